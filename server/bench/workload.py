"""S-LoRA's synthetic workload: which adapter is asked, when, with how many tokens.

Source: Sheng et al., "S-LoRA: Serving Thousands of Concurrent LoRA Adapters", section 7.1: arrivals
are a Gamma process of a given rate and coefficient of variation, adapters are chosen by a power
law, input and output lengths are uniform.
"""

from dataclasses import dataclass

import numpy as np

# Common English words: nearly every tokenizer has each of them (with its space) as one token.
_WORDS = """\
the of and to in is that for it as was with be by on not he his but at are this have from or
had an they which one you were all her she there would their we him been has when who will
no more if out so up said what its about than into them can only other time new some could
these two may first then do any like my now over such our man me even most made after also
did many off before must well back through years where much your way down should because
long each just state those people too place still world right hand part under day life war
number water house work high school city small end last night point home great year side men
money power three white group family car body face room words next book love best line""".split()


@dataclass(frozen=True)
class Planned:
    """One request of the plan. `at`: seconds after the start."""

    at: float
    adapter: str | None
    prompt: str | list[int]
    output_tokens: int


@dataclass(frozen=True)
class Workload:
    """What is asked. Rates are requests a second, lengths are tokens, both ends included."""

    adapters: tuple[str | None, ...]
    rate: float
    cv: float
    alpha: float
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    duration: float
    seed: int
    vocab_size: int | None = None  # send token ids below this; None: send words

    def plan(self) -> list[Planned]:
        """Every request of the run, in order of arrival; the same for the same seed."""
        random = np.random.default_rng(self.seed)
        shape = 1.0 / self.cv**2
        weights = np.arange(1, len(self.adapters) + 1, dtype=np.float64) ** -self.alpha
        weights /= weights.sum()
        planned = []
        at = random.gamma(shape, 1.0 / (self.rate * shape))
        while at < self.duration:
            planned.append(
                Planned(
                    at=at,
                    adapter=self.adapters[random.choice(len(self.adapters), p=weights)],
                    prompt=self._prompt(random),
                    output_tokens=int(random.integers(*self.output_len, endpoint=True)),
                )
            )
            at += random.gamma(shape, 1.0 / (self.rate * shape))
        return planned

    def _prompt(self, random: np.random.Generator) -> str | list[int]:
        length = int(random.integers(*self.input_len, endpoint=True))
        if self.vocab_size is None:
            return " ".join(random.choice(_WORDS, size=length))
        low = min(1000, self.vocab_size // 2)  # the first ids are often special tokens
        return [int(token) for token in random.integers(low, self.vocab_size, size=length)]
