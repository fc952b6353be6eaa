"""Chapter 07, data: dates against the calendar, downloads against a server that does everything wrong, vocabularies, batches.

The tests that need Multi30k find it through the environment variable ATTENTION_COURSE_MULTI30K, and are skipped without it.
"""

import copy
import gzip
import hashlib
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

pytest.importorskip("tokenizers", reason="needs attention-course[translation]")

from attention_course import translation
from attention_course.translation import (
    BOS,
    EOS,
    PAD,
    SPECIAL_TOKENS,
    UNK,
    Vocabulary,
    collate,
    date_examples,
    date_pairs,
    load_multi30k,
    token_batches,
    train_vocabulary,
)

quiet = pytest.mark.usefixtures("no_shape_check")
at_hand = pytest.mark.skipif(not os.environ.get("ATTENTION_COURSE_MULTI30K"), reason="ATTENTION_COURSE_MULTI30K names no folder")


# --- dates ----------------------------------------------------------------------------------------------------------

ENGLISH = dict(zip("January February March April May June July August September October November December".split(), range(1, 13)))
ENGLISH |= {name[:3]: number for name, number in ENGLISH.items()}
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
SMALL = dict(zip(
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split(),
    range(1, 20)))
SMALL |= {tens: 10 * i for i, tens in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), start=2)}
IRREGULAR = {"first": "one", "second": "two", "third": "three", "fifth": "five", "eighth": "eight", "ninth": "nine", "twelfth": "twelve"}


def english_number(words):
    "A number below 100 in words, cardinal or ordinal, read by a rule of its own."
    total = 0
    for word in words.split("-"):
        word = IRREGULAR.get(word, word)
        word = re.sub("ieth$", "y", word)
        total += SMALL[word if word in SMALL else word.removesuffix("th")]
    return total


def english_year(words):
    if words.startswith("two thousand"):
        rest = words.removeprefix("two thousand").removeprefix(" and ")
        return 2000 + (english_number(rest) if rest else 0)
    century, rest = words.split(" ", 1)
    return 100 * english_number(century) + (0 if rest == "hundred" else english_number(rest.removeprefix("oh ")))


DIGITS = {c: str(i) for digits in ("0123456789", "〇一二三四五六七八九", "零一二三四五六七八九") for i, c in enumerate(digits)}


def chinese_number(text):
    text = text.replace("廿", "二十").replace("卅", "三十")
    if "十" not in text:
        return int("".join(DIGITS[c] for c in text))
    tens, ones = text.split("十")
    return 10 * (chinese_number(tens) if tens else 1) + (chinese_number(ones) if ones else 0)


def read(source, language):
    "Year, month, day and weekday (or None) of a date, by patterns that know nothing of how it was made."
    if language == "zh":
        number = "([0-9〇零一二三四五六七八九十廿卅]+)"
        found = re.fullmatch(f"(?:公历)?{number}年{number}月{number}[日号](?:[ ，（]?(?:星期|周)([一二三四五六日天])）?)?", source)
        y, m, d, w = found.groups()
        return chinese_number(y), chinese_number(m), chinese_number(d), w and "一二三四五六日".index(w.replace("天", "日"))
    words = source
    w = next((i for i, name in enumerate(DAYS) if re.match(f"({name}|{name[:3]},)", words)), None)
    if w is not None:
        words = re.sub(rf"^{DAYS[w][:3]}\w*,? ", "", words)
    month = re.search("|".join(sorted(ENGLISH, key=len, reverse=True)), words)[0]
    before, after = words.split(month)
    if re.search(r"\w", before):
        day, year = before, after
    else:
        day, year = after.split(", ", 1)
    day = re.sub(r"\b(the|of)\b", "", day).strip()
    year = year.strip(", ")
    day = int(re.sub("(st|nd|rd|th)$", "", day)) if day[0].isdigit() else english_number(day)
    return int(year) if year.isdigit() else english_year(year), ENGLISH[month], day, w


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_date_means_what_its_target_says_read_by_rules_that_know_nothing_of_the_styles(language):
    for source, target, _ in date_examples(6000, seed=3, languages=(language,)):
        year, month, day, weekday = read(source, language)
        assert date(year, month, day).isoformat() == target, source
        assert weekday in (None, date(year, month, day).weekday()), source


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_style_comes_and_about_as_often_as_the_others(language):
    styles = translation._STYLES[language]
    for style in styles:  # no style leaves out what the answer needs, or says it twice
        assert sorted(name[0] for name in re.findall(r"{(\w+)}", style) if name[0] != "w") == ["d", "m", "y"], style
    counts = {style: 0 for style in styles}
    for source, target, fields in date_examples(4000, seed=0, languages=(language,)):
        forms = translation._written(date.fromisoformat(target))
        for style in (style for style in styles if style.format(**forms) == source):
            counts[style] += 1
    assert min(counts.values()) > 4000 / len(styles) * 0.7


def test_years_are_said_as_people_say_them():
    said = {1900: "nineteen hundred", 1905: "nineteen oh five", 1987: "nineteen eighty-seven", 2000: "two thousand",
            2005: "two thousand and five", 2010: "twenty ten", 2040: "twenty forty", 2099: "twenty ninety-nine"}
    for year, words in said.items():
        assert translation._written(date(year, 1, 1))["y_words"] == words


def test_ordinals_take_their_own_endings():
    written = [translation._written(date(2000, 1, d))["d_th"] for d in range(1, 32)]
    assert [written[d - 1] for d in (1, 2, 3, 4, 11, 12, 13, 21, 22, 23, 31)] == [
        "1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "23rd", "31st"]


def test_fields_line_up_with_the_source_and_each_part_alone_tells_its_part_of_the_answer():
    for source, target, fields in date_examples(2000, seed=5):
        assert len(fields) == len(source) and set(fields) <= set("ymdw-")
        for letter in "ymd":  # each field is one run of characters, and there
            assert re.findall(f"{letter}+", fields) == [letter * fields.count(letter)], (source, fields)
        day = re.sub("[日号]|st|nd|rd|th", "", "".join(c for c, f in zip(source, fields) if f == "d"))
        if day.isdecimal():
            assert int(day) == int(target[8:])
        month = "".join(c for c, f in zip(source, fields) if f == "m")
        if month in ENGLISH:
            assert ENGLISH[month] == int(target[5:7])


def test_no_day_comes_twice_so_parts_of_one_list_share_none():
    pairs = date_pairs(20_000, seed=0)
    assert len({target for _, target in pairs}) == 20_000
    assert len({source for source, _ in pairs}) == 20_000


@quiet
def test_all_days_of_two_centuries_can_be_drawn_and_not_one_more():
    days = {target for _, target in date_pairs(73_049, seed=0)}
    assert len(days) == 73_049 and min(days) == "1900-01-01" and max(days) == "2099-12-31" and "2000-02-29" in days


@quiet  # the shape check itself draws from Python's generator
def test_a_seed_gives_the_same_dates_and_no_global_generator_moves():
    random.seed(0), torch.manual_seed(0)
    before = random.getstate(), torch.get_rng_state()
    assert date_pairs(50, seed=1) == date_pairs(50, seed=1) != date_pairs(50, seed=2)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert date_pairs(5, seed=7) == [(s, t) for s, t, _ in date_examples(5, seed=7)]


def test_languages_share_the_list_evenly_and_each_can_be_had_alone():
    def chinese(pairs):
        return sum("年" in source for source, _ in pairs)

    assert 850 < chinese(date_pairs(2000, seed=0)) < 1150
    assert chinese(date_pairs(200, seed=0, languages=("en",))) == 0
    assert chinese(date_pairs(200, seed=0, languages=["zh"])) == 200
    assert date_pairs(0, seed=0) == []


@quiet
@pytest.mark.parametrize(("n", "options", "error", "says"), [
    (-1, {}, ValueError, "n=-1"),
    (73_050, {}, ValueError, "73049"),
    (1.5, {}, TypeError, "integer"),
    (1, {"seed": "a"}, TypeError, "integer"),
    (1, {"languages": ("de",)}, ValueError, "'de'"),
    (1, {"languages": "en"}, ValueError, "'en'"),
    (1, {"languages": ()}, ValueError, "languages=()"),
    (1, {"languages": iter(["de"])}, ValueError, "languages=('de',)"),
    (1, {"seed": -3}, ValueError, "seed=-3; expected at least 0"),
])
def test_dates_refuse_what_cannot_be_drawn(n, options, error, says):
    with pytest.raises(error, match=re.escape(says)):
        date_pairs(n, **{"seed": 0, **options})


# --- downloads ------------------------------------------------------------------------------------------------------

def page(name, number):
    lines = [f"{name} sentence {i}" for i in range(number)]
    return gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0)


SPLITS = {"train": "train", "val": "val", "test": "test_2016_flickr"}
FILES = {f"{stem}.{language}.gz": page(f"{stem} {language}", n)
         for stem, n in (("train", 2000), ("val", 4), ("test_2016_flickr", 3)) for language in ("de", "en")}
TABLE = {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in FILES.items()}
RIGHT = {split: [(f"{stem} de sentence {i}", f"{stem} en sentence {i}") for i in range(n)]
         for (split, stem), n in zip(SPLITS.items(), (2000, 4, 3))}


class Handler(BaseHTTPRequestHandler):
    "Serves `server.files`, each file as `server.modes` says."

    def do_GET(self):
        name = self.path.rsplit("/", 1)[-1]
        data, mode = self.server.files[name], self.server.modes.get(name, self.server.mode)
        self.server.asked.append(name)
        if mode == "404":
            return self.send_error(404)
        if mode == "silent":
            return self.server.enough.wait(30)
        if mode == "html":
            data = b"<!doctype html><title>Log in</title>" + b" " * 500
        if mode == "wrong":  # a good gzip file of the right length, but another one
            data = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        if mode == "longer":
            data += b"\0"
        self.send_response(200)
        if mode == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        elif mode not in ("endless", "closed"):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        half = len(data) // 2
        if mode in ("truncated", "closed"):  # with and without a length that was promised
            self.wfile.write(data[:half])
        elif mode == "chunked":
            self.wfile.write(b"%x\r\n" % len(data) + data[:half])
        elif mode == "stalled":
            self.wfile.write(data[:half])
            self.wfile.flush()
            self.server.half_sent.set()
            self.server.enough.wait(30)
        elif mode == "endless":
            for _ in range(1200):  # 12 seconds: longer than the test allows
                self.wfile.write(data)
                time.sleep(0.01)
        elif mode == "slow":  # longer than the timeout in all, but never silent for so long
            for start in range(0, len(data), len(data) // 8 + 1):
                self.wfile.write(data[start : start + len(data) // 8 + 1])
                self.wfile.flush()
                time.sleep(0.3)
        else:
            self.wfile.write(data)

    def handle(self):
        try:
            super().handle()
        except ConnectionError:  # the other side has had enough
            pass

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch, tmp_path):
    "A server of six small files on this machine, which the library takes for those of Multi30k, and an empty cache."
    monkeypatch.setattr(translation, "_MULTI30K", TABLE)
    monkeypatch.delenv("ATTENTION_COURSE_MULTI30K", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    http.files, http.mode, http.modes, http.asked = FILES, "right", {}, []
    http.half_sent, http.enough = threading.Event(), threading.Event()
    http.url = f"http://127.0.0.1:{http.server_port}/data"
    http.cache = tmp_path / "cache" / "attention_course" / "multi30k"
    threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
    yield http
    http.enough.set()
    http.shutdown()
    http.server_close()


def kept(server):
    "What is in the cache, by name; all of it must be whole."
    names = sorted(path.name for path in server.cache.iterdir()) if server.cache.is_dir() else []
    for name in names:
        assert (server.cache / name).read_bytes() == FILES.get(name), name
    return names


def test_a_download_brings_the_pairs_and_is_made_only_once(server, capsys):
    assert load_multi30k(url=server.url) == RIGHT
    assert kept(server) == sorted(FILES) and server.asked == list(FILES)
    assert "downloading train.de.gz" in capsys.readouterr().out
    assert load_multi30k(url=server.url) == RIGHT
    assert len(server.asked) == 6 and capsys.readouterr().out == ""
    assert load_multi30k(download=False) == RIGHT


FAULTS = {
    "truncated": "expected",
    "closed": "expected",
    "chunked": "IncompleteRead",
    "stalled": "timed out",
    "silent": "timed out",
    "wrong": "SHA-256",
    "longer": "expected",
    "endless": "expected",
    "html": "<!doctype html>",
    "404": "404",
}


@pytest.mark.parametrize("mode", FAULTS)
def test_a_bad_download_is_an_error_that_helps_leaves_nothing_and_does_not_stand_in_the_way_of_the_next(server, mode):
    server.mode = mode
    started = time.monotonic()
    with pytest.raises(OSError) as caught:
        load_multi30k(url=server.url, timeout=0.5)
    assert time.monotonic() - started < 10
    says = str(caught.value)
    assert FAULTS[mode] in says and f"{server.url}/train.de.gz" in says
    assert "ATTENTION_COURSE_MULTI30K" in says and "github.com/multi30k/dataset" in says
    assert kept(server) == []
    server.mode = "right"
    assert load_multi30k(url=server.url) == RIGHT


@pytest.mark.parametrize("mode", ["truncated", "wrong", "stalled"])
def test_a_download_that_breaks_at_the_fourth_file_keeps_the_three_before_it(server, mode):
    fourth = list(FILES)[3]
    server.modes[fourth] = mode
    with pytest.raises(OSError, match=fourth):
        load_multi30k(url=server.url, timeout=0.5)
    assert kept(server) == sorted(list(FILES)[:3])
    server.modes.clear(), server.asked.clear()
    assert load_multi30k(url=server.url) == RIGHT
    assert server.asked == list(FILES)[3:]


def test_slow_is_not_silent(server):
    server.modes["train.de.gz"] = "slow"  # 2.4 s in all
    assert load_multi30k(url=server.url, timeout=2.0) == RIGHT


def test_nobody_there_is_an_error_that_helps(server):
    server.shutdown()
    server.server_close()
    with pytest.raises(OSError, match="ATTENTION_COURSE_MULTI30K") as caught:
        load_multi30k(url=server.url, timeout=2.0)
    assert "refused" in str(caught.value)
    assert kept(server) == []


def test_a_file_of_the_cache_that_went_bad_is_fetched_again(server):
    load_multi30k(url=server.url)
    for bad in (b"", FILES["val.en.gz"][:-1], FILES["val.de.gz"]):
        server.asked.clear()
        (server.cache / "val.en.gz").write_bytes(bad)
        with pytest.raises(FileNotFoundError, match="val.en.gz"):
            load_multi30k(url=server.url, download=False)
        assert server.asked == []
        assert load_multi30k(url=server.url) == RIGHT
        assert server.asked == ["val.en.gz"]


def test_what_may_not_be_downloaded_is_not_there(server):
    with pytest.raises(FileNotFoundError, match="not at hand"):
        load_multi30k(url=server.url, download=False)
    assert server.asked == [] and not server.cache.exists()


def put(folder, **changed):
    folder.mkdir(exist_ok=True)
    for name, data in {**FILES, **changed}.items():
        if data is not None:
            (folder / name).write_bytes(data)
    return folder


def test_a_folder_is_read_by_argument_or_variable_and_never_written_or_filled_from_the_network(server, tmp_path, monkeypatch):
    folder = put(tmp_path / "mine")
    folder.chmod(0o555)
    assert load_multi30k(folder) == load_multi30k(str(folder)) == RIGHT
    monkeypatch.setenv("ATTENTION_COURSE_MULTI30K", str(folder))
    assert load_multi30k(url=server.url) == RIGHT
    monkeypatch.setenv("ATTENTION_COURSE_MULTI30K", "")  # as if it were not set
    assert load_multi30k(url=server.url) == RIGHT and len(server.asked) == 6
    folder.chmod(0o755)
    (folder / "val.de.gz").unlink()
    with pytest.raises(FileNotFoundError, match="val.de.gz"):
        load_multi30k(folder, url=server.url)
    monkeypatch.setenv("ATTENTION_COURSE_MULTI30K", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_multi30k(url=server.url)
    assert len(server.asked) == 6


@pytest.mark.parametrize("bad", [b"", b"<html>", FILES["train.en.gz"][:-1], FILES["train.de.gz"]])
def test_a_wrong_file_in_a_folder_is_refused_by_name_and_left_alone(server, tmp_path, bad):
    folder = put(tmp_path / "mine", **{"train.en.gz": bad})
    with pytest.raises(ValueError, match="train.en.gz is not the file"):
        load_multi30k(folder, url=server.url)
    assert (folder / "train.en.gz").read_bytes() == bad and server.asked == []


def test_many_that_download_at_once_do_each_other_no_harm(server):
    server.modes["val.de.gz"] = "slow"
    with ThreadPoolExecutor(6) as pool:
        assert all(data == RIGHT for data in pool.map(lambda _: load_multi30k(url=server.url), range(6)))
    assert kept(server) == sorted(FILES)


def other_process(code, server):
    "Another Python that sees the same server, cache and table of files."
    setup = f"import os, signal\nfrom attention_course import translation\ntranslation._MULTI30K = {TABLE!r}\n"
    return subprocess.Popen([sys.executable, "-c", f"{setup}{code}\ntranslation.load_multi30k(url={server.url!r})"],
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_killed_while_a_file_comes_in_nothing_is_left_of_it(server):
    server.modes["val.de.gz"] = "stalled"
    process = other_process("", server)
    assert server.half_sent.wait(600), process.stderr.read()
    process.kill()
    process.wait()
    assert kept(server) == ["train.de.gz", "train.en.gz"]
    server.modes.clear()
    assert load_multi30k(url=server.url) == RIGHT


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs kill -9")
def test_killed_while_a_file_is_written_what_is_left_is_never_used(server):
    process = other_process("os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)", server)
    process.wait(600)
    assert process.returncode == -signal.SIGKILL, process.stderr.read()
    assert not any(name in FILES for name in os.listdir(server.cache))
    assert load_multi30k(url=server.url) == RIGHT
    assert {name: (server.cache / name).read_bytes() for name in FILES} == FILES


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_stopped_while_a_file_is_written_the_old_one_stays_and_nothing_else(tmp_path, monkeypatch, error):
    path = tmp_path / "file"
    translation._write_file(path, b"old")

    def stop(*_):
        raise error

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, stop)
            with pytest.raises(error):
                translation._write_file(path, b"new")
        assert os.listdir(tmp_path) == ["file"] and path.read_bytes() == b"old"
    translation._write_file(path, b"new")
    assert os.listdir(tmp_path) == ["file"] and path.read_bytes() == b"new"


@quiet
@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "1", True])
def test_a_timeout_is_a_number_of_seconds(server, timeout):
    with pytest.raises(ValueError, match="timeout="):
        load_multi30k(url=server.url, timeout=timeout)


# --- vocabularies ---------------------------------------------------------------------------------------------------

TEXTS = [
    "Ein Mann, der läuft.", "A man who is running.", "Zwei Männer laufen über die Straße.", "Two men are running across the street.",
    "Der Hund „Bello“ rennt – schnell!", 'The dog "Bello" runs fast!', "Eine Frau läuft mit dem Hund.", "A woman is running with the dog.",
]


@pytest.fixture(scope="module")
def vocabulary():
    return train_vocabulary(TEXTS, 120)


def test_the_first_four_ids_are_special_and_the_size_is_kept(vocabulary):
    assert (PAD, BOS, EOS, UNK) == (0, 1, 2, 3)
    assert vocabulary.tokens(range(4)) == list(SPECIAL_TOKENS) == ["<pad>", "<s>", "</s>", "<unk>"]
    assert len(vocabulary) == 120
    assert len(train_vocabulary(TEXTS, 100_000)) < 1000  # as many as there is to merge


@pytest.mark.parametrize("options", [{"size": 60}, {"size": 120}, {"size": 300}, {"characters": True}])
def test_a_text_comes_back_as_it_was(options):
    vocabulary = train_vocabulary(TEXTS, **options)
    for text, ids in zip(TEXTS, vocabulary.encode_batch(TEXTS), strict=True):
        assert ids == vocabulary.encode(text) and ids[-1] == EOS and min(ids[:-1]) > UNK
        assert vocabulary.decode(ids) == text
    assert vocabulary.encode("") == [EOS] and vocabulary.decode([EOS]) == vocabulary.decode([]) == ""
    assert vocabulary.encode_batch([]) == []


def test_more_tokens_cut_a_text_into_fewer(vocabulary):
    lengths = [sum(map(len, train_vocabulary(TEXTS, size).encode_batch(TEXTS))) for size in (60, 90, 120, 200)]
    assert lengths == sorted(lengths, reverse=True) and lengths[-1] < lengths[0] / 2


def test_no_token_reaches_over_a_space_or_holds_punctuation_and_letters(vocabulary):
    for token in vocabulary.tokens(range(4, len(vocabulary))):
        assert "▁" not in token[1:]
        assert token.isalpha() or len(token) == 1 or (token[0] == "▁" and token[1:].isalpha()), token


def test_what_was_never_seen_is_unknown_and_falls_out_when_decoded(vocabulary):
    ids = vocabulary.encode("Ein 漢 Hund")
    assert ids.count(UNK) == 1 and vocabulary.decode(ids).split() == ["Ein", "Hund"]


def test_text_that_looks_like_a_special_token_is_text():
    for options in ({"size": 120}, {"characters": True}):
        vocabulary = train_vocabulary([*TEXTS, "a < b > c / d pumpkin"], **options)
        for text in ("Ein </s> Mann", "<s> <pad>", "<unk>"):
            for again in (vocabulary, pickle.loads(pickle.dumps(vocabulary))):
                ids = again.encode(text)
                assert min(ids[:-1]) > UNK and ids.count(EOS) == 1 and again.decode(ids) == text


def test_decoding_stops_at_the_end_and_leaves_special_tokens_out(vocabulary):
    ids = vocabulary.encode("Ein Mann")
    assert vocabulary.decode([BOS, *ids, *ids, PAD, PAD]) == "Ein Mann"
    assert vocabulary.decode(torch.tensor([BOS, *ids, PAD])) == "Ein Mann"
    assert vocabulary.decode([BOS, UNK, *ids[:-1]]) == "Ein Mann"
    assert vocabulary.decode([EOS, *ids]) == ""
    assert vocabulary.tokens(torch.tensor([BOS, *ids]))[0] == "<s>"


@pytest.mark.slow
def test_the_same_texts_give_the_same_vocabulary_in_another_process_which_imports_the_extra_only_then(vocabulary):
    code = ("import sys; from attention_course import translation as t; "
            "print(sorted({'tokenizers', 'sacrebleu', 'safetensors', 'matplotlib'} & set(sys.modules))); "
            f"print(t.train_vocabulary({TEXTS!r}, 120).tokenizer.to_str())")
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, encoding="utf-8")
    imported, made = other.stdout.strip().split("\n")
    assert imported == "[]"
    assert made == vocabulary.tokenizer.to_str() == train_vocabulary(iter(TEXTS), 120).tokenizer.to_str()


@pytest.mark.parametrize("options", [{"size": 120}, {"characters": True}])
def test_a_vocabulary_can_be_saved_pickled_and_copied(tmp_path, options):
    vocabulary = train_vocabulary(TEXTS, **options)
    vocabulary.save(tmp_path / "sub" / "vocabulary.json")
    assert os.listdir(tmp_path / "sub") == ["vocabulary.json"]
    for again in (Vocabulary.load(tmp_path / "sub" / "vocabulary.json"), pickle.loads(pickle.dumps(vocabulary)),
                  copy.deepcopy(vocabulary), copy.copy(vocabulary)):
        assert len(again) == len(vocabulary) and again is not vocabulary
        for text in (*TEXTS, "</s> neu", ""):
            assert again.encode(text) == vocabulary.encode(text)
            assert again.decode(again.encode(text)) == vocabulary.decode(vocabulary.encode(text))
        if not options.get("characters"):
            assert again.encode_batch(TEXTS, dropout=0.5, generator=seeded(0)) == vocabulary.encode_batch(
                TEXTS, dropout=0.5, generator=seeded(0))


@quiet
def test_a_file_that_holds_no_vocabulary_is_refused_by_name(tmp_path):
    from tokenizers import Tokenizer, models

    with pytest.raises(FileNotFoundError):
        Vocabulary.load(tmp_path / "none.json")
    for content in (b"", b"{}", b"\xff\xfe", b"[1]", Tokenizer(models.BPE()).to_str().encode()):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(ValueError, match="bad.json holds no vocabulary"):
            Vocabulary.load(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="expected .*<pad>"):
        Vocabulary(Tokenizer(models.BPE()))


@quiet
@pytest.mark.parametrize(("texts", "options", "error", "says"), [
    ("Ein Mann", {"size": 100}, TypeError, "texts is one string"),
    (["Ein", 3], {"size": 100}, TypeError, "text 1 is a int"),
    ([], {"size": 100}, ValueError, "0 texts"),
    (["", ""], {"characters": True}, ValueError, "2 texts"),
    (TEXTS, {}, ValueError, "size is missing"),
    (TEXTS, {"size": 20}, ValueError, "size=20 is too small"),
    (TEXTS, {"size": 20, "characters": True}, ValueError, "size=20 is too small"),
    (TEXTS, {"size": -1}, ValueError, "size=-1; expected at least 1"),
    (TEXTS, {"size": 2**70}, ValueError, f"size={2**70}"),
    (TEXTS, {"size": 99.5}, TypeError, "size is a float; expected a whole number"),
    (["Ein", "\udcff"], {"size": 100}, ValueError, "text 1 is not Unicode"),
])
def test_a_vocabulary_refuses_texts_and_sizes_that_make_none(texts, options, error, says):
    with pytest.raises(error, match=re.escape(says)):
        train_vocabulary(texts, **options)


@quiet
@pytest.mark.parametrize(("call", "error", "says"), [
    (lambda v: v.encode(3), TypeError, "text 0 is a int"),
    (lambda v: type(v)(5), TypeError, "tokenizer is a int"),
    (lambda v: v.encode_batch("Ein Mann"), TypeError, "texts is one string"),
    (lambda v: v.encode_batch(["Ein"], dropout=1.5), ValueError, "dropout=1.5"),
    (lambda v: v.encode_batch(["Ein"], dropout=float("nan")), ValueError, "dropout=nan"),
    (lambda v: v.decode([120]), ValueError, "120"),
    (lambda v: v.decode([-1]), ValueError, "-1"),
    (lambda v: v.decode([4.0]), ValueError, "4.0"),
    (lambda v: v.decode([[4, 5]]), ValueError, "of one text"),
    (lambda v: v.decode(torch.tensor([[4, 5]])), ValueError, "of one text"),
    (lambda v: v.tokens([4, 200]), ValueError, "0 to 119"),
])
def test_a_vocabulary_refuses_what_is_no_text_and_no_id(vocabulary, call, error, says):
    with pytest.raises(error, match=re.escape(says)):
        call(vocabulary)


@quiet
def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"attention-course\[translation\]"):
        train_vocabulary(TEXTS, 100)


# --- BPE-dropout ----------------------------------------------------------------------------------------------------

def seeded(seed):
    return torch.Generator().manual_seed(seed)


def pieces(vocabulary, text):
    return [p for word in vocabulary._words(text) for p in translation._cut(word, vocabulary._ranks())]


def test_our_own_cut_is_that_of_the_library(vocabulary):
    for text in (*TEXTS, "laufender Hundemann", "x", "  zwei   Leerzeichen ", "man's T-Shirt", "漢字 Mann"):
        ids = [vocabulary.tokenizer.token_to_id(p) for p in pieces(vocabulary, text)]
        assert [UNK if i is None else i for i in ids] == vocabulary.encode(text)[:-1], text


def test_dropout_cuts_differently_and_means_the_same(vocabulary):
    usual = vocabulary.encode_batch(TEXTS)
    cut = vocabulary.encode_batch(TEXTS, dropout=0.3, generator=seeded(0))
    assert [vocabulary.decode(ids) for ids in cut] == TEXTS
    assert all(ids[-1] == EOS and ids.count(EOS) == 1 for ids in cut)
    assert cut != usual and sum(map(len, cut)) > sum(map(len, usual))
    apart = vocabulary.encode_batch(TEXTS, dropout=1.0, generator=seeded(0))
    assert all(len(token) == 1 for ids in apart for token in vocabulary.tokens(ids[:-1]))


def test_dropout_passes_over_a_merge_with_the_probability_that_was_asked_for():
    ranks, rng = {("a", "b"): 0}, random.Random(0)
    merged = sum(translation._cut("ab", ranks, 0.3, rng) == ["ab"] for _ in range(4000))
    assert 0.66 < merged / 4000 < 0.74


@quiet  # the shape check itself draws from Python's generator
def test_dropout_is_repeated_by_a_generator_and_touches_no_other(vocabulary):
    random.seed(0), torch.manual_seed(0)
    before = random.getstate(), torch.get_rng_state()
    first, second = (vocabulary.encode_batch(TEXTS, dropout=0.3, generator=seeded(s)) for s in (1, 1))
    assert first == second != vocabulary.encode_batch(TEXTS, dropout=0.3, generator=seeded(2))
    one = seeded(1)
    assert vocabulary.encode_batch(TEXTS, dropout=0.3, generator=one) != vocabulary.encode_batch(TEXTS, dropout=0.3, generator=one)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_dropout_leaves_characters_alone_for_there_is_nothing_to_merge():
    vocabulary = train_vocabulary(TEXTS, characters=True)
    assert vocabulary.encode_batch([*TEXTS, "漢 x", ""], dropout=0.5) == vocabulary.encode_batch([*TEXTS, "漢 x", ""])


# --- batches --------------------------------------------------------------------------------------------------------

def random_pairs(n, seed=0, longest=40):
    rng = random.Random(seed)
    pairs = []
    for _ in range(n):
        n_s = rng.randint(1, longest)
        pairs.append(([rng.randint(4, 9) for _ in range(n_s)], [5] * min(longest, max(1, n_s + rng.randint(-3, 3)))))
    return pairs


@pytest.mark.parametrize("generator", [None, 0])
@pytest.mark.parametrize("max_tokens", [40, 97, 400, 100_000])
def test_each_pair_comes_once_and_no_side_of_a_batch_is_larger_than_allowed(max_tokens, generator):
    pairs = random_pairs(300)
    batches = token_batches(pairs, max_tokens, generator=None if generator is None else seeded(generator))
    assert sorted(i for batch in batches for i in batch) == list(range(300)) and all(batches)
    for batch in batches:
        src, tgt = collate([pairs[i] for i in batch])
        assert src.numel() <= max_tokens and tgt[:, 1:].numel() <= max_tokens


def test_batches_are_as_full_as_they_may_be():
    pairs = random_pairs(3000)
    batches = token_batches(pairs, 400, generator=seeded(0))
    longest = [max(len(side) for i in batch for side in pairs[i]) for batch in batches]
    full = [len(batch) * n for batch, n in zip(batches, longest)]
    assert sum(full) / len(full) > 370
    assert token_batches(pairs[:1], 400) == [[0]]


def test_batches_hold_little_padding():
    pairs = random_pairs(3000)
    for generator in (None, seeded(0)):
        tensors = [collate([pairs[i] for i in batch]) for batch in token_batches(pairs, 400, generator=generator)]
        for side in range(2):
            assert sum((t[side] == PAD).sum().item() for t in tensors) / sum(t[side].numel() for t in tensors) < 0.04


@quiet  # the shape check itself draws from Python's generator
def test_without_a_generator_batches_are_the_same_and_short_ones_come_first():
    pairs = random_pairs(500)
    random.seed(0), torch.manual_seed(0)
    before = random.getstate(), torch.get_rng_state()
    batches = token_batches(pairs, 400)
    assert batches == token_batches(pairs, 400)
    longest = [max(len(side) for i in batch for side in pairs[i]) for batch in batches]
    assert longest == sorted(longest)
    token_batches(pairs, 400, generator=seeded(0))
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_a_generator_shuffles_batches_and_who_meets_in_them_and_a_seed_repeats_it():
    pairs = random_pairs(3000)
    first, again, other = (token_batches(pairs, 400, generator=seeded(s)) for s in (1, 1, 2))
    assert first == again != other
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in other}
    longest = [max(len(side) for i in batch for side in pairs[i]) for batch in first]
    assert longest != sorted(longest)
    one = seeded(1)
    assert token_batches(pairs, 400, generator=one) != token_batches(pairs, 400, generator=one)  # a new order each epoch


def test_no_pairs_make_no_batches():
    assert token_batches([], 100) == [] == token_batches([], 100, generator=seeded(0))


@quiet
@pytest.mark.parametrize(("pairs", "max_tokens", "error", "says"), [
    ([([4], [5]), ([4] * 11, [5])], 10, ValueError, "pair 1 has 11 source and 1 target tokens; expected at least 1 and at most max_tokens=10"),
    ([([4], [5] * 11)], 10, ValueError, "pair 0 has 1 source and 11 target"),
    ([([], [5])], 10, ValueError, "pair 0 has 0 source"),
    ([([4], [5])], 0, ValueError, "max_tokens=0"),
    ([([4], [5]), ([4], [5, PAD])], 10, ValueError, "pair 1 has the id 0 in it, which is `<pad>`"),
    ([([4], [5])], 10.0, TypeError, "integer"),
])
def test_batches_refuse_sentences_that_fit_none(pairs, max_tokens, error, says):
    with pytest.raises(error, match=re.escape(says)):
        token_batches(pairs, max_tokens)


def test_a_batch_is_two_tensors_filled_with_padding():
    src, tgt = collate([([4, 5, EOS], [6, EOS]), ([7, EOS], [8, 9, 4, EOS])])
    assert src.dtype == tgt.dtype == torch.int64
    assert src.tolist() == [[4, 5, EOS], [7, EOS, PAD]]
    assert tgt.tolist() == [[BOS, 6, EOS, PAD, PAD], [BOS, 8, 9, 4, EOS]]


@quiet
def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="pairs is empty"):
        collate([])
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        collate([([1.5], [2])])


# --- the real Multi30k, where it is at hand -------------------------------------------------------------------------

@pytest.fixture(scope="module")
def multi30k():
    return load_multi30k()


@at_hand
def test_multi30k_has_its_pairs_and_none_is_empty(multi30k):
    assert {split: len(pairs) for split, pairs in multi30k.items()} == {"train": 29_000, "val": 1_014, "test": 1_000}
    assert all(german.strip() and english.strip() for pairs in multi30k.values() for german, english in pairs)
    assert multi30k["train"][0] == (
        "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.", "Two young, White males are outside near many bushes.")


@at_hand
@pytest.mark.slow
def test_every_sentence_of_multi30k_survives_a_vocabulary_of_the_training_split(multi30k):
    vocabulary = train_vocabulary((text for pair in multi30k["train"] for text in pair), 8000)
    assert len(vocabulary) == 8000
    for split, pairs in multi30k.items():
        texts = [text for pair in pairs for text in pair]
        encoded = vocabulary.encode_batch(texts)
        assert not any(UNK in ids for ids in encoded), split
        assert [vocabulary.decode(ids) for ids in encoded] == texts, split
    ranks, texts = vocabulary._ranks(), [text for pair in multi30k["val"] for text in pair]
    for text, ids in zip(texts, vocabulary.encode_batch(texts)):
        assert vocabulary.tokens(ids[:-1]) == [p for word in vocabulary._words(text) for p in translation._cut(word, ranks)]

    pairs = list(zip(*(vocabulary.encode_batch(side) for side in zip(*multi30k["train"]))))
    batches = token_batches(pairs, 3000, generator=seeded(0))
    real = sum(len(source) + len(target) for source, target in pairs)
    room = sum(len(b) * (max(len(pairs[i][0]) for i in b) + max(len(pairs[i][1]) for i in b)) for b in batches)
    assert 1 - real / room < 0.05


def test_the_table_of_files_names_a_size_and_a_checksum_for_each():
    assert list(translation._MULTI30K) == list(FILES)
    for size, digest in translation._MULTI30K.values():
        assert size > 20_000 and re.fullmatch("[0-9a-f]{64}", digest)
    assert re.search("/[0-9a-f]{40}/", translation._MULTI30K_URL) and translation._MULTI30K_URL.startswith("https://")
