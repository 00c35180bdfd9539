"""How a GGUF file's text is split before byte-pair merging: llama.cpp's list of tokenizer.ggml.pre
(src/llama-vocab.cpp), with the patterns that the models' own tokenizer.json files have.

Every pattern splits what the one before it left; what no pattern matches is a piece of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True)
class Pre:
    """patterns: regular expressions, one after the other. ignore_merges: a piece that is a token is
    taken whole. nfc: text is normalised first. whole: pieces stay UTF-8 with a mark for the space
    instead of becoming byte letters."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False
    whole: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(p), behavior="isolated") for p in self.patterns
        ]
        if not self.whole:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ASCII = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_KANJI = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_KIMI_UPPER = _UPPER[:-1] + r"&&[^\p{Han}]]"
_KIMI_LOWER = _LOWER[:-1] + r"&&[^\p{Han}]]"
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134"
    "\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters that have a case, as the first DeepSeek models list them (escaped, because an editor that
normalises text would change ranges of letters that look alike)."""
_DEEPSEEK_LETTERS = rf"\s?[{_CASED}]+"
_DEEPSEEK_MARKS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
    "\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|"
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
_QWEN2 = rf"{_SHORT}|{_WORD}|\p{{N}}|{_MARKS}|{_SPACES}"
_QWEN35 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK3 = (
    rf"{_ASCII}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


def _cased(before: str, after: str, digits: str, upper: str = _UPPER, lower: str = _LOWER) -> str:
    """Words by their case, as tiktoken's o200k splits them."""
    word = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{word}{upper}*{lower}+{after}|{word}{upper}+{lower}*{after}|{digits}|"
        rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_O200K = _cased("", f"{_SHORT}?", r"\p{N}{1,3}")
_DEFAULT = Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_DIGIT_GPT2 = Pre((r"\p{N}", _GPT2))
_DIGITS_DEEPSEEK3 = Pre((r"\p{N}{1,3}", _KANJI, _DEEPSEEK3))
_LINES = Pre((r"[^\n]+|[\n]+",), whole=True)

_GROUPS: dict[str, Pre] = {
    "default": _DEFAULT,
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Pre(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": Pre((_LLAMA3,)),
    "jais-2": Pre(
        (
            rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|\s*[\r\n]+|"
            + "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
            + r"|\s{1,2}(?!\S)|\s{1}",
        )
    ),
    "minicpm5": Pre(
        (r"\p{N}{1,3}", rf"{_SHORT}|{_WORD}|\p{{N}}+|{_MARKS}|{_SPACES}"), ignore_merges=True
    ),
    "deepseek-llm": Pre(
        (
            r"[\r\n]",
            _DEEPSEEK_LETTERS,
            _DEEPSEEK_MARKS,
            r"\s+$",
            _EAST_ASIAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    "deepseek-v3 hunyuan-dense hy_v4 joyai-llm": _DIGITS_DEEPSEEK3,
    "spark2_5": Pre(
        (
            r"\p{N}{1,3}",
            _KANJI,
            rf"{_ASCII}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+|"
            r"[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    "youtu": Pre(
        (
            _YOUTU_SCRIPTS + _KANJI,
            _cased("", f"{_SHORT}?", r"\p{N}"),
        ),
        ignore_merges=True,
    ),
    "falcon": Pre((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": _DIGIT_GPT2,
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt"
    " olmo jais trillion granite-docling exaone4": Pre((_GPT2,)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez": Pre((_QWEN2,), nfc=True),
    "stablelm2 hunyuan solar-open grok-2": Pre((_QWEN2,)),
    "qwen35": Pre((_QWEN35,), nfc=True),
    "ufakzeka": Pre((rf"{_WORD}|\p{{N}}|{_MARKS}|{_SPACES}",)),
    "laguna": Pre((r"[^\n]+|[\n]+", _QWEN2)),
    "poro-chat bloom gpt3-finnish": Pre((_BLOOM,)),
    "viking": Pre((_BLOOM, r"\p{N}")),
    "tekken": Pre((_cased("", "", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "chameleon": Pre(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Pre((_O200K,)),
    "granite-embed-multi-97m": Pre((_O200K,), ignore_merges=True),
    "tiny_aya cohere2moe": Pre((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K)),
    "kimi-k2": Pre(
        (
            rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_SHORT}?|"
            rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_SHORT}?|\p{{N}}{{1,3}}|"
            rf"{_MARKS}|{_SPACES}",
        )
    ),
    "superbpe": Pre((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "bailingmoe bailingmoe2 llada-moe": Pre(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}|"
            r" ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "seed-coder": Pre((rf"{_SHORT}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "afmoe": Pre((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _AFMOE_SCRIPTS, _DEEPSEEK3)),
    "exaone-moe": Pre(
        (
            rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
            r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "gemma4 granite-embed-multi-311m": Pre(_LINES.patterns, add_bos=True, whole=True),
    "sarvam-moe": _LINES,
}
PRE_TOKENIZERS: dict[str, Pre] = {
    name: pre for names, pre in _GROUPS.items() for name in names.split()
}
"""tokenizer.ggml.pre -> the split. Of llama.cpp's list these are missing: "jina-v1-en",
"jina-v2-code", "roberta-bpe" and "whitespace", which belong to encoders."""
