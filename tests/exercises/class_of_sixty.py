"""Sixty students and some more: half of them honest, the others' files are broken, hostile or cheat.

Used by: `test_grading`. `DOZEN` are those that every run of the tests grades.
"""

import bz2
import io
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from minimegatron.exercises.exercise import exercises, find
from tests.exercises.cheats import CHEATS, TEACHERS_CHEATS
from tests.exercises.handed_in import tar_bytes, zip_bytes

HONEST, WRONG, BROKEN, HOSTILE, CHEAT = "honest", "wrong", "broken", "hostile", "cheat"
FIRST = find("ex01")
OWN = Path(__file__).parent / "honest"
"""Solutions that students wrote who had not seen the reference's."""
SLEEPER = "minimegatron-test-sleeper"
BODY = "\n\ndef coordinates(*args, **kwargs):\n    attack()\n\n\nget_ranks = coordinates\n"
PLACES = ("/tmp", "/var/tmp", "/etc", "/dev/shm", str(Path.home()), str(Path(__file__).parents[2]))

ATTACKS = {
    "loop": "    while True:\n        pass\n",
    "sleep": "    import time\n    time.sleep(1000)\n",
    "fork bomb": "    while True:\n        os.fork()\n",
    "exit": "    os._exit(0)\n",
    "flood": "    while True:\n        os.write(1, b'passed ' * 100_000)\n",
    "kill": "    import signal\n    for pid in (os.getppid(), -1):\n"
    "        os.kill(pid, signal.SIGKILL)\n",
    "memory": "    kept = []\n    while True:\n"
    "        kept.append(bytearray(os.urandom(1 << 20) * 64))\n",
    "memory in files": "    kept = []\n    while True:\n"
    "        kept.append(os.memfd_create('x'))\n        os.write(kept[-1], bytes(8 << 20))\n",
    "write": "    for folder in FOLDERS:\n        for name in ('evil', '../evil'):\n            try:\n"
    "                open(os.path.join(folder, name), 'w').write('evil')\n"
    "            except OSError:\n                pass\n    os._exit(0)\n",
    "daemon": "    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
    "            os.execvp('sh', ['sh', '-c', ': SLEEPER; sleep 997; touch FOLDERS0/late'])\n"
    "    os._exit(0)\n",
    "forge": "    import gc, json\n    for folder in range(3, 64):\n        try:\n"
    '            os.write(folder, b\'{"kind": "passed", "text": ""}\\n\')\n'
    "        except OSError:\n            pass\n"
    "    import minimegatron.exercises.room.room as room\n"
    "    room.Wrong.__init__ = lambda *_: os._exit(0)\n    return 1\n",
    "50 MB message": "    raise ValueError('\\x1b[31m' * 10_000_000)\n",
}


@dataclass(frozen=True)
class Student:
    """One who hands something in."""

    name: str
    kind: str
    hand_in: Callable[[Path], None]
    """Writes it into the folder of all submissions."""
    exercise: str = FIRST.name


def attacker(attack: str, folders: str | tuple[str, ...]) -> str:
    """The file of a hostile student. `folders`: where it writes."""
    places = [*folders, *PLACES]
    text = ATTACKS[attack].replace("FOLDERS0", places[0]).replace("SLEEPER", SLEEPER)
    return f"import os\n\nFOLDERS = {places!r}\n\n\ndef attack():\n{text}{BODY}"


def everybody() -> list[Student]:
    """All of them."""
    return [*_honest(), *_forms(), *_broken(), *_hostile(), *_cheats()]


DOZEN = (
    *("honest ex01", "honest ex05", "honest ex13", "UPPER", "declares latin-1"),
    *("broken deflate", "not Python", "hostile forge", "hostile fork bomb", "hostile write"),
    *("cheat the solution, read and run", "cheat a profiler copies what is expected"),
)


# -- Honest --


def _honest() -> Iterator[Student]:
    for exercise in exercises():
        source = (OWN / f"{exercise.name}.py").read_bytes()
        name = f"honest {exercise.number}"
        yield Student(name, HONEST, _folder(name, exercise.name, source), exercise.name)


def _forms() -> Iterator[Student]:
    """The same honest file, handed in in every form that is allowed."""
    source, file = (OWN / f"{FIRST.name}.py").read_bytes(), f"{FIRST.name}.py"
    inside = (f"deep/inside/{file}", source)
    latin = "# -*- coding: latin-1 -*-\n# für\n".encode("latin-1") + source
    archives = {
        "UPPER": (".ZIP", zip_bytes(inside)),
        "zipped with lzma": (".zip", zip_bytes(inside, method=zipfile.ZIP_LZMA)),
        "tar and gzip": (".tar.gz", _gzipped(inside)),
        "tar and bzip2": (".tar.bz2", bz2.compress(tar_bytes(inside))),
        "tar and xz": (".tar.xz", lzma.compress(tar_bytes(inside))),
        "with others": (".zip", zip_bytes(inside, ("../../out.py", b"x"), ("a/.json", b"{}"))),
    }
    for name, (ending, data) in archives.items():
        yield Student(name, HONEST, _file(f"{name}{ending}", data))
    texts = {
        "declares latin-1": (FIRST.name, latin),
        "with a mark": (FIRST.name, b"\xef\xbb\xbf" + source),
        "from Windows": (FIRST.name, source.replace(b"\n", b"\r\n")),
        "a b": (FIRST.name.upper(), source),
        "a_b": ("ex01_mine", source),
    }
    for name, (stem, data) in texts.items():
        yield Student(name, HONEST, _folder(name, stem, data))


def _gzipped(*members: tuple[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


# -- Broken --


def _broken() -> Iterator[Student]:
    source, file = (OWN / f"{FIRST.name}.py").read_bytes(), f"{FIRST.name}.py"
    for name, method in (
        ("broken deflate", zipfile.ZIP_DEFLATED),
        ("broken lzma", zipfile.ZIP_LZMA),
    ):
        yield Student(
            name, BROKEN, _file(f"{name}.zip", _spoilt(zip_bytes((file, source), method=method)))
        )
    yield Student("not Python", BROKEN, _folder("not Python", FIRST.name, b"def coordinates(:\n"))
    yield Student("null bytes", BROKEN, _folder("null bytes", FIRST.name, source + b"\0"))
    yield Student(
        "latin-1 in secret", BROKEN, _folder("latin-1 in secret", FIRST.name, b"# f\xfcr\n")
    )
    yield Student("linked", BROKEN, lambda base: (base / "linked").symlink_to("/usr"))
    name = os.fsdecode(b"no utf\xff8")
    yield Student("no utf\\xff8", BROKEN, lambda base: (base / name).mkdir())


def _spoilt(data: bytes) -> bytes:
    """With other bytes in the middle of the packed file."""
    begin = len(data) // 4
    return (
        data[:begin] + bytes(byte ^ 0x5A for byte in data[begin : begin + 40]) + data[begin + 40 :]
    )


# -- Hostile, and cheating --


def _hostile() -> Iterator[Student]:
    for attack in ATTACKS:
        name = f"hostile {attack}"
        yield Student(name, HOSTILE, _attack(name, attack))


def _attack(name: str, attack: str) -> Callable[[Path], None]:
    def hand_in(base: Path) -> None:
        source = attacker(attack, (str(base), str(base.parent / "teacher")))
        _folder(name, FIRST.name, source.encode())(base)

    return hand_in


def _cheats() -> Iterator[Student]:
    for words, (number, source) in (CHEATS | TEACHERS_CHEATS).items():
        name, exercise = f"cheat {words}", find(number)
        yield Student(name, CHEAT, _folder(name, exercise.name, source.encode()), exercise.name)


# -- Handing in --


def _folder(name: str, stem: str, data: bytes) -> Callable[[Path], None]:
    def hand_in(base: Path) -> None:
        (base / name).mkdir()
        ending = ".PY" if stem.isupper() else ".py"
        (base / name / f"{stem}{ending}").write_bytes(data)

    return hand_in


def _file(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda base: (base / name).write_bytes(data) and None
