"""Where compiled programs are kept: the folder of the user, unless an option or a variable names another."""

import os

import jax
import pytest

from bert_jax.process import program_cache
from bert_jax.process.program_cache import use_program_cache

DIR, SECONDS = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """The cache of a user, of a process without a folder of compiled programs."""
    before = {name: getattr(jax.config, name) for name in (DIR, SECONDS)}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    jax.config.update(DIR, None)
    jax.config.update(SECONDS, 1.0)
    monkeypatch.setenv("NPROC", "3")
    yield tmp_path / "bert_jax" / "programs"
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_go_to_the_folder_of_the_user(home):
    use_program_cache()
    assert getattr(jax.config, DIR) == str(home / "3_threads") and home.is_dir()
    assert getattr(jax.config, SECONDS) == program_cache.LEAST_SECONDS


def test_a_least_time_that_the_program_has_set_stays(home):
    jax.config.update(SECONDS, 5.0)
    use_program_cache()
    assert getattr(jax.config, SECONDS) == 5.0


def test_a_file_that_another_process_deletes_does_not_turn_the_folder_off(home):
    home.mkdir(parents=True)
    (home / "deleted").symlink_to(home / "nowhere")
    use_program_cache()
    assert getattr(jax.config, DIR) == str(home / "3_threads")


def test_programs_of_another_number_of_threads_are_not_read(home, monkeypatch):
    """A program for CPUs is divided among the threads of the process that compiled it; with programs of one thread,
    two cores take 3% longer."""
    monkeypatch.delenv("NPROC")
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, threads=threads: set(range(threads)), raising=False)
        use_program_cache(str(home))
        found.append(getattr(jax.config, DIR))
    assert found == [str(home / "1_threads"), str(home / "2_threads")]


def test_an_option_and_the_variable_of_jax_come_first(home, tmp_path):
    jax.config.update(DIR, "from JAX_COMPILATION_CACHE_DIR")
    use_program_cache()
    assert getattr(jax.config, DIR) == "from JAX_COMPILATION_CACHE_DIR"
    use_program_cache(str(tmp_path / "mine"))
    assert getattr(jax.config, DIR) == str(tmp_path / "mine" / "3_threads") and not home.exists()


@pytest.mark.parametrize("fault", ["a file in its place", "not writable", "no home"])
def test_a_folder_that_cannot_be_written_is_not_used(home, monkeypatch, fault):
    if fault == "a file in its place":
        home.parent.write_text("")
    elif fault == "not writable":
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(program_cache.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    use_program_cache()
    assert getattr(jax.config, DIR) is None


def test_what_was_used_longest_ago_goes(home, monkeypatch):
    monkeypatch.setattr(program_cache, "MAX_BYTES", 2500)
    (home / "1_threads").mkdir(parents=True)
    for age, name in enumerate(("new", "1_threads/read", "1_threads/old", "oldest")):
        (home / name).write_bytes(bytes(1000))
        os.utime(home / name, (1e9 - age, 1e9 - age))
    os.utime(home / "1_threads/read", (2e9, 1e9 - 1))
    use_program_cache()
    assert {path.name for path in home.rglob("*") if path.is_file()} == {"new", "read"}
