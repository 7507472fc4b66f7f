"""Analysis of finished students: their predictions and inner layers, compared with their teacher's."""
