"""InferenceService: what clients call. `Generate` is the router's five stops, top to bottom."""

from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from ostrya.api.v1 import inference_pb2, inference_pb2_grpc
from ostrya.router import convert
from ostrya.router.admission import Admission, Ticket
from ostrya.router.answer import Answer
from ostrya.router.choices import merged
from ostrya.router.closing import Closing
from ostrya.router.decide import Decider, Together
from ostrya.router.metrics import RouterMetrics
from ostrya.router.observe import Observation, observed
from ostrya.router.offload import Offload
from ostrya.router.proxy import Job, Proxy
from ostrya.router.served import ServedModel
from ostrya.service.sampling import check_prompt_logprobs
from ostrya.service.status import Context, translated
from ostrya.service.tracing import NO_TRACER, Span, Tracer
from ostrya.text.detokenize import Detokenizer


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves one model."""

    def __init__(
        self,
        *,
        served: ServedModel,
        admission: Admission,
        decider: Decider,
        proxy: Proxy,
        closing: Closing,
        bounds: convert.Bounds,
        offload: Offload,
        metrics: RouterMetrics,
        draw_seed: Callable[[], int],
        clock: Callable[[], float],
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._served = served
        self._admission = admission
        self._decider = decider
        self._proxy = proxy
        self._closing = closing
        self._bounds = bounds
        self._offload = offload
        self._metrics = metrics
        self._draw_seed = draw_seed
        self._clock = clock
        self._tracer = tracer

    @translated
    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """One answer. A cancel or the deadline cancels the replica's work too."""
        served = self._served
        with (
            self._tracer.request("ostrya.generate", context.invocation_metadata()) as span,
            observed(self._metrics, self._clock, span, self._closing) as observation,
            self._admission.admit(  # 1
                request_id=request.request_id,
                remaining_s=context.time_remaining(),
                num_places=convert.num_choices(request),
            ) as ticket,
        ):
            observation.request_id, observation.deadline = ticket.request_id, ticket.deadline
            limits = served.limits()
            asked = await self._asked(request, limits)
            span.set({"gen_ai.request.model": served.name})
            with span.child("ostrya.tokenize"):
                prompt = await served.tokens(asked.prompt)  # 2
                bad_words = await served.sequences(asked.bad_words)
            convert.check_length(len(prompt), max_tokens=asked.sampling.max_tokens, limits=limits)
            check_prompt_logprobs(len(prompt), asked.sampling.prompt_logprobs)
            observation.num_prompt_tokens = len(prompt)
            choices = self._choices(ticket, asked, prompt, bad_words, observation, span)
            async with self._closing.request(), aclosing(merged(choices)) as responses:  # 5
                async for response in responses:
                    yield response

    @translated
    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """The ids a prompt becomes, exactly as Generate would see them."""
        with self._admission.admit(request_id="", remaining_s=context.time_remaining()):
            served, bounds = self._served, self._bounds
            prompt = await self._offload.run(
                lambda: convert.text_prompt(request, model=served.name, bounds=bounds),
                num_bytes=convert.request_bytes(request),
            )
            token_ids = await served.tokens(prompt)
            return await self._offload.run(lambda: convert.tokenized(token_ids), num_bytes=4 * len(token_ids))

    @translated
    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """The pool's model."""
        limits, num_ready = self._served.limits(), self._served.num_ready()
        model = inference_pb2.Model(
            name=self._served.name,
            context_tokens=limits.context_tokens if num_ready else 0,
            vocab_size=limits.vocab_size,
            num_replicas_ready=num_ready,
        )
        return inference_pb2.ListModelsResponse(models=[model])

    def _choices(
        self,
        ticket: Ticket,
        asked: convert.Asked,
        prompt: "array[int]",
        bad_words: tuple[tuple[int, ...], ...],
        observation: Observation,
        span: Span,
    ) -> list[AsyncGenerator[inference_pb2.GenerateResponse, None]]:
        """The streams of n answers, which one replica computes if it can."""
        tokenizer, together, choices = self._served.tokenizer, Together(), []
        for choice in range(asked.num_choices):
            sampling = asked.sampling.of_choice(choice)
            routing = self._decider.open(  # 3 and, for every try, 4
                ticket, prompt, max_tokens=sampling.max_tokens, seed=sampling.seed, together=together
            )
            answer = Answer(
                Detokenizer(tokenizer, stop=asked.stop),
                request_id=ticket.request_id,
                num_prompt_tokens=len(prompt),
                ending_token_ids={*tokenizer.eos_token_ids, *sampling.stop_token_ids},
                min_tokens=sampling.min_tokens,
                choice=choice,
            )
            job = Job(
                ticket=ticket,
                prompt=prompt,
                sampling=sampling,
                bad_words=bad_words,
                priority=asked.priority,
                routing=routing,
                span=span,
            )
            choices.append(self._responses(job, answer, observation))
        return choices

    async def _responses(
        self, job: Job, answer: Answer, observation: Observation
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """One choice, to its end; that of a stop string ends the replica's work too."""
        async with aclosing(self._proxy.stream(job)) as parts:
            async for part in parts:
                observation.part(part)
                response = answer.add(part)
                if response is not None:
                    yield response
                if answer.finished:
                    return

    async def _asked(self, request: inference_pb2.GenerateRequest, limits: convert.Limits) -> convert.Asked:
        return await self._offload.run(
            lambda: convert.asked(
                request, model=self._served.name, bounds=self._bounds, limits=limits, draw_seed=self._draw_seed
            ),
            num_bytes=convert.request_bytes(request),
        )
