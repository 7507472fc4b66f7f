"""Programs that serve an exported model: ``serve.py`` of a folder to serve, by what the outputs of a model mean.

They need fastapi, onnxruntime and tokenizers only. ``deploy.serving`` fills in the fields in braces; doubled braces are
Python's own.
"""

ROWS = """\
import json, fastapi, numpy, onnxruntime, tokenizers
app, labels = fastapi.FastAPI(), [*json.load(open("config.json")).get("id2label", {{}}).values()]
tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
tokenizer.enable_truncation({max_length}), tokenizer.enable_padding(pad_id={padding})
session = onnxruntime.InferenceSession("{file}", providers=["CPUExecutionProvider"])
@app.post("/predict")
def predict(inputs: list[str | tuple[str, str]] = fastapi.Body(embed=True)):
    texts, fields = tokenizer.encode_batch({texts}), {fields}
    feeds = {{name: numpy.array([getattr(text, field) for text in texts]) for name, field in fields.items()}}
    return [{reply} for text, row in zip(texts, session.run({outputs}, feeds)[0])]
"""
"""A reply for each text, or each pair of texts, from its row of the outputs."""

SPANS = """\
import fastapi, numpy, onnxruntime, tokenizers
app, tokenizer, short = fastapi.FastAPI(), *(tokenizers.Tokenizer.from_file("tokenizer.json") for _ in range(2))
tokenizer.enable_truncation({max_length}, stride={overlap}, strategy="only_second")
tokenizer.enable_padding(pad_id={padding})
short.enable_truncation({max_question})
session = onnxruntime.InferenceSession("{file}", providers=["CPUExecutionProvider"])
@app.post("/predict")
def predict(inputs: list[tuple[str, str]] = fastapi.Body(embed=True)):
    ends = [max([0, *(end for _, end in short.encode(text, add_special_tokens=False).offsets)]) for text, _ in inputs]
    texts = tokenizer.encode_batch([(text[:end], context) for (text, context), end in zip(inputs, ends)])
    windows = [(number, window) for number, text in enumerate(texts) for window in (text, *text.overflowing)]
    feeds = {{name: numpy.array([getattr(window, field) for _, window in windows]) for name, field in {fields}.items()}}
    best, null = [dict(answer="", score=-1e9) for _ in inputs], [1e9] * len(inputs)
    for (number, window), start, end in zip(windows, *session.run({outputs}, feeds)):
        is_context = numpy.array([side == 1 for side in window.sequence_ids])
        valid = numpy.triu(numpy.outer(is_context, is_context))
        scores = numpy.where(valid & ~numpy.triu(valid, {max_answer}), start[:, None] + end, -1e9)
        first, last = numpy.unravel_index(scores.argmax(), scores.shape)
        null[number] = min(null[number], float(start[0] + end[0]))
        if scores[first, last] > best[number]["score"]:
            answer = inputs[number][1][window.offsets[first][0] : window.offsets[last][1]]
            best[number] = dict(answer=answer, score=float(scores[first, last]))
    return [dict(answer="", score=low) if low - one["score"] > {threshold} else one for one, low in zip(best, null)]
"""
"""The best span of each context, an empty one for "no answer"; a long context is read in windows."""
