"""The public names and where they live: read by type checkers and editors, and by `__init__.py` at run time."""

from wavecore.engine_core.api.config import EngineConfig as EngineConfig
from wavecore.engine_core.api.custom_ops import register_op as register_op
from wavecore.engine_core.api.sampling_params import SamplingParams as SamplingParams
from wavecore.frontend.async_llm import AsyncLLM as AsyncLLM
from wavecore.frontend.client.mailbox import OutputKind as OutputKind
from wavecore.frontend.llm import LLM as LLM
from wavecore.frontend.llm import connect as connect
from wavecore.frontend.outputs import CompletionOutput as CompletionOutput
from wavecore.frontend.outputs import EmbeddingOutput as EmbeddingOutput
from wavecore.frontend.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
from wavecore.frontend.outputs import Logprob as Logprob
from wavecore.frontend.outputs import RequestMetrics as RequestMetrics
from wavecore.frontend.outputs import RequestOutput as RequestOutput
from wavecore.frontend.pipeline import ModelPipeline as ModelPipeline
from wavecore.frontend.pipeline import StageOutput as StageOutput
from wavecore.frontend.prompts import EmbedsPrompt as EmbedsPrompt
from wavecore.frontend.prompts import PromptType as PromptType
from wavecore.frontend.prompts import TextPrompt as TextPrompt
from wavecore.frontend.prompts import TokensPrompt as TokensPrompt
from wavecore.transport.errors import ConfigError as ConfigError
from wavecore.transport.errors import EngineDead as EngineDead
from wavecore.transport.errors import ModelError as ModelError
from wavecore.transport.errors import NotSupportedError as NotSupportedError
from wavecore.transport.errors import NumericalError as NumericalError
from wavecore.transport.errors import Overloaded as Overloaded
from wavecore.transport.errors import ProtocolError as ProtocolError
from wavecore.transport.errors import RequestError as RequestError
from wavecore.transport.errors import RequestTimeout as RequestTimeout
from wavecore.transport.errors import ResourceError as ResourceError
from wavecore.transport.errors import StartError as StartError
from wavecore.transport.errors import ValidationError as ValidationError
from wavecore.transport.errors import WavecoreError as WavecoreError

__version__: str
