"""What usage costs: a price file of the operator's, and the arithmetic."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtime.errors import StartupError

_MILLION: Final = Decimal(10**6)
_HOUR_S: Final = Decimal(3600)
_GIB: Final = Decimal(2**30)
Price = Annotated[Decimal, Field(ge=0, le=Decimal(10**9), allow_inf_nan=False)]


class Rates(BaseModel):
    """Prices by what is measured. What has none costs nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sampled_per_million: Price = Decimal(0)  # tokens
    prefilled_per_million: Price = Decimal(0)
    cached_per_million: Price = Decimal(0)  # tokens of prompts whose KV was there
    engine_hour: Price = Decimal(0)
    sandbox_hour: Price = Decimal(0)
    host_gib_hour: Price = Decimal(0)
    nvme_gib_hour: Price = Decimal(0)
    shared_gib_hour: Price = Decimal(0)


# Of each price: the measure that it is of, and how much of it one price buys.
_OF: Final[Mapping[str, tuple[str, Decimal]]] = {
    "sampled_per_million": ("sampled_tokens", _MILLION),
    "prefilled_per_million": ("prefilled_tokens", _MILLION),
    "cached_per_million": ("cached_tokens", _MILLION),
    "engine_hour": ("engine_s", _HOUR_S),
    "sandbox_hour": ("sandbox_s", _HOUR_S),
    "host_gib_hour": ("host_byte_hours", _GIB),
    "nvme_gib_hour": ("nvme_byte_hours", _GIB),
    "shared_gib_hour": ("shared_byte_hours", _GIB),
}


class Prices(Rates):
    """The price file: a currency, prices, and other prices for models by name."""

    currency: str = Field(min_length=1, max_length=16)
    models: dict[str, dict[str, Price]] = Field(default_factory=dict)

    def of(self, model: str) -> Rates:
        base = self.model_dump(exclude={"currency", "models"})
        return Rates(**(base | self.models.get(model, {})))

    def cost(self, model: str, used: Mapping[str, Any]) -> Decimal | None:
        """Of what was used of one model; None where something that has a price is not known."""
        rates, total = self.of(model), Decimal(0)
        for name, (measure, unit) in _OF.items():
            price: Decimal = getattr(rates, name)
            if not price:
                continue
            if used[measure] is None:
                return None
            total += price * Decimal(str(used[measure])) / unit
        return total


def load(path: Path | None) -> Prices | None:
    """Raises StartupError with the file's name and what is wrong in it."""
    if path is None:
        return None
    try:
        prices = Prices.model_validate(json.loads(path.read_text(), parse_float=Decimal))
        for model in prices.models:
            prices.of(model)
    except OSError as error:
        raise StartupError(f"TENUTO_PRICES: {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise StartupError(f"TENUTO_PRICES: {path}: {where or 'the file'}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise StartupError(f"TENUTO_PRICES: {path} is not JSON: {error}") from error
    return prices
