"""Programs that run an exported model, by what its outputs mean: for the model card, and as ``serve.py``.

They need onnxruntime and tokenizers, and fastapi to serve. ``deploy.serving`` fills in the fields in braces; doubled
braces are Python's own.
"""

_START = """\
import numpy, onnxruntime, tokenizers

{labels}tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
tokenizer.no_padding()
"""
_SESSION = """\
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = {threads}
session = onnxruntime.InferenceSession("{file}", options, providers=["CPUExecutionProvider"])


def run(text):  # one at a time: in a batch, int8 rounds a text by the values of the others
    feeds = {{name: numpy.array([getattr(text, field)]) for name, field in {fields}.items()}}
    return [output[0] for output in session.run({outputs}, feeds)]


"""
ROWS = f"""\
{_START}tokenizer.enable_truncation({{max_length}}, direction="{{side}}")
{_SESSION}def predict(inputs):
    texts = tokenizer.encode_batch({{texts}})
    return [{{reply}} for text, (row,) in zip(texts, map(run, texts))]
"""
"""A reply for each text, or each pair of texts, from its row of the outputs."""

SPANS = f"""\
{_START}tokenizer.enable_truncation({{max_length}}, stride={{overlap}}, strategy="only_second")
questions = tokenizers.Tokenizer.from_file("tokenizer.json")
questions.enable_truncation({{max_question}})
{_SESSION}def predict(inputs):
    return [answer(*pair) for pair in inputs]


def answer(question, context):
    end = max([0, *(end for _, end in questions.encode(question, add_special_tokens=False).offsets)])
    text = tokenizer.encode(question[:end], context)
    best, null = dict(answer="", score=-1e9), 1e9
    for window in (text, *text.overflowing):
        start, end = run(window)
        is_context = numpy.array([side == 1 for side in window.sequence_ids])
        valid = numpy.triu(numpy.outer(is_context, is_context))
        scores = numpy.where(valid & ~numpy.triu(valid, {{max_answer}}), start[:, None] + end, -1e9)
        first, last = numpy.unravel_index(scores.argmax(), scores.shape)
        null = min(null, float(start[0] + end[0]))
        if scores[first, last] > best["score"]:
            span = slice(window.offsets[first][0], window.offsets[last][1])
            best = dict(answer=context[span], score=float(scores[first, last]))
    return dict(answer="", score=null) if null - best["score"] > {{threshold}} else best
"""
"""The best span of each context, an empty one for "no answer"; a long context is read in windows."""

SERVICE = """\


import fastapi
from fastapi.exceptions import RequestValidationError

app = fastapi.FastAPI()


@app.exception_handler(RequestValidationError)
def refuse(request, error):  # without the input, which JSON may not hold
    detail = [dict(loc=one["loc"], msg=one["msg"]) for one in error.errors()]
    return fastapi.responses.JSONResponse(dict(detail=detail), 422)


@app.post("/predict")
def reply(inputs: list[{input}] = fastapi.Body(min_length=1, max_length=256), truncate: bool = fastapi.Body(True)):
    try:
        size = len("".join(map("".join, inputs)).encode())
    except UnicodeEncodeError:
        raise fastapi.HTTPException(422, "a text has half of a surrogate pair")
    if size > {largest}:
        raise fastapi.HTTPException(413, "more than {largest} bytes of text")
{empty}    if not truncate and any({cut}):
        raise fastapi.HTTPException(422, "a text is too long, and truncate is false")
    return predict(inputs)
"""
"""What ``serve.py`` has after one of the programs above: requests with limits."""

EMPTY = """\
    if not all(inputs):
        raise fastapi.HTTPException(422, "a text is empty")
"""
"""A check for tokenizers that make no token of an empty text, such as those of decoders."""
