"""The three endpoints that make tokens, from an accepted Job to the last byte of its answer.

    Intake (may refuse: 4xx) ─▶ Run in the engine ─┬─▶ stream: head at once, then events
                                                   ├─▶ whole: one JSON body at the end
                                                   └─▶ first: one JSON body at the first token (sequential.py)

A stream's head goes out as soon as the request is accepted: a router that waits for both halves' heads must not wait
for decode's tokens. What fails after the head becomes an error event and [DONE], in a complete chunked body.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from splitserve import log
from splitserve.errors import RequestError, SplitserveError
from splitserve.net import sse
from splitserve.net.request import Request, named
from splitserve.net.responder import Responder

from .answer import Shape, error_events
from .failures import FailureLog
from .intake import Intake
from .job import ClientLeft, Job, Run
from .openai_answer import ChatForm, CompletionForm, OpenAIShape
from .resumption import ticket_header
from .sequential import handed_over
from .service import Service
from .sglang import SglangShape

_log = log.get(__name__)

ShapeOf = Callable[[Run], Shape]
Accept = Callable[[Intake, Request], Awaitable[tuple[Job, ShapeOf]]]


class Generation:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._failures = FailureLog()
        self._log = log.RequestLog(_log, slow_s=service.settings.slow_s, clock=service.clock)

    async def chat(self, request: Request, responder: Responder) -> None:
        """OpenAI's chat completions."""
        await self._serve(request, responder, endpoint="chat", accept=_accept_chat)

    async def completion(self, request: Request, responder: Responder) -> None:
        """OpenAI's completions: a text, token ids, or a list of either."""
        await self._serve(request, responder, endpoint="completions", accept=_accept_completion)

    async def generate(self, request: Request, responder: Responder) -> None:
        """SGLang's generate: text or input_ids, one or a list; streams are cumulative."""
        await self._serve(request, responder, endpoint="generate", accept=_accept_generate)

    async def _serve(self, request: Request, responder: Responder, *, endpoint: str, accept: Accept) -> None:
        service = self._service
        try:
            job, shape_of = await accept(service.admit(), request)
            if responder.gone:
                return
            run = Run(
                job,
                service.link,
                tokenizer=service.model().tokenizer,
                metrics=service.metrics,
                deadline_s=service.settings.deadline_s,
                clock=service.clock,
            )
            run.start()
        except SplitserveError as e:
            service.metrics.refused(endpoint, e.status)
            self._failures.refused(endpoint, e)
            raise
        asked = request.headers.get("x-request-id", "")
        await self._answer(run, shape_of(run), responder, name=named(job.rids[0], asked))

    async def _answer(self, run: Run, shape: Shape, responder: Responder, *, name: str) -> None:
        """Answer and account for it. Whatever happens, nothing of the run is left in the engine."""
        service, job = self._service, run.job
        service.runs.add(run)
        service.metrics.began(job.num_prompt_tokens)
        status = "500"
        responder.on_left = run.leave
        try:
            answer = _first if job.answers_first else _stream if job.stream else _whole
            status = await answer(run, shape, responder, self._failures)
        except ClientLeft:
            status = "client_left"
        except SplitserveError as e:
            status = str(e.status)
            self._failures.failed(job, e)
            raise
        finally:
            run.close()
            service.runs.discard(run)
            service.metrics.ended(job.endpoint, status, seconds=run.age_s)
            seconds, aborted = run.age_s, run.aborted
            self._log.ended(
                lambda: (
                    f"request {name} ({job.endpoint}{job.half and ', ' + job.half}): {status}"
                    f"{', aborted' if aborted else ''}, {run.num_output} tokens of output, {seconds:.3f} s"
                ),
                seconds=seconds,
                usual=status == "200" and not aborted,
            )


async def _stream(run: Run, shape: Shape, responder: Responder, failures: FailureLog) -> str:
    """Events until all choices have ended. Returns the status for the metrics."""
    responder.start_stream(headers=(("cache-control", "no-cache"), *ticket_header(run.job.ticket)))
    try:
        while not run.ended:
            events = shape.frames(await run.take())
            if run.ended:  # in one write: a router that lost us between the two could not tell how it ends
                responder.end(events + shape.last() + sse.DONE)
            elif events:
                responder.write(events)
                await responder.drain()
    except SplitserveError as e:
        failures.failed(run.job, e)
        responder.end(error_events(e))
        return f"error:{e.code}"
    return "200"


async def _whole(run: Run, shape: Shape, responder: Responder, _: FailureLog) -> str:
    while deltas := await run.take():
        shape.take(deltas)
    responder.send_json(200, shape.whole())
    return "200"


async def _first(run: Run, shape: Shape, responder: Responder, failures: FailureLog) -> str:
    """Answer with the first tokens; the run lives on until decode has taken the state, or its lease ends."""
    while not run.all_begun and (deltas := await run.take()):
        shape.take(deltas)
    responder.on_left = None
    responder.send_json(200, {**shape.whole(), "kv_transfer_params": handed_over(run.job)})
    try:
        while await run.take():
            pass
    except SplitserveError as e:
        failures.failed(run.job, e)
        return f"error:{e.code}"
    return "200"


async def _accept_chat(intake: Intake, request: Request) -> tuple[Job, ShapeOf]:
    job, style = await intake.chat_job(request.body, request.headers)
    form = ChatForm(style, intake.tokenizer)
    return job, lambda run: OpenAIShape(run, style, form=form)


async def _accept_completion(intake: Intake, request: Request) -> tuple[Job, ShapeOf]:
    job, style = await intake.completion_job(request.body, request.headers)
    return job, lambda run: OpenAIShape(run, style, form=CompletionForm(style, intake.tokenizer, run))


async def _accept_generate(intake: Intake, request: Request) -> tuple[Job, ShapeOf]:
    job, style = await intake.generate_job(request.body, request.headers)
    if job.answers_first and style.many:
        raise RequestError("kv_transfer_params is for one prompt and one choice", field="kv_transfer_params")
    return job, lambda run: SglangShape(run, style, tokenizer=intake.tokenizer)
