"""Breaks the source on purpose, a line at a time, and checks that a named test notices.

Run it by `make mutants`: each breakage is made in a copy, never in the tree itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = "src/hydra_torchrun_launcher"
COPY = ROOT
AT_ONCE = 3
"""Breakages at a time: many a test then waits for what never comes."""
HANG_S = 60
"""How long they wait, in the place of the tests' own bound."""


class Mutant(NamedTuple):
    """One breakage: a file of the package, what stands there, what it becomes, who notices."""

    module: str
    line: str
    broken: str
    test: str


MUTANTS = [
    Mutant("ranks", "self._report_failure(rank, note.exit_code)", "pass", "test_faults.py::test_values_of_rank_0"),
    Mutant("keeper", "self._stop_job(signal.SIGTERM)", "pass", "test_faults.py::test_killed_launching_process"),
    Mutant("ranks", "rank.leave.within(self._grace_s)", "pass", "test_faults.py::test_killed_server"),
    Mutant("keeper", "self._everything.within(0)", "pass", "test_faults.py::test_second_signal_kills"),
    Mutant("ranks", 'rank.recorded = "crashed"', "return", "test_faults.py::test_failing_rank[crash_at_exit]"),
    Mutant("keeper", "kill(self._agent_pid, signum)", "pass", "test_faults.py::test_signal_stops_job_and_sweep[2]"),
    Mutant("ranks", "os.setsid()", "pass", "test_ranks.py::test_process_is_fresh[forkserver]"),
    Mutant("keeper", "die_with_parent(keeper_pid)", "pass", "test_faults.py::test_orphans_of_keeper_without_server"),
    Mutant("server", "self._end_orphans()", "pass", "test_faults.py::test_killed_keeper_leaves_no_grandchild"),
    Mutant("servers", "processes.die_with_parent(parent_pid)", "pass", "test_faults.py::test_launching_process_killed_early"),
    Mutant("servers", "start_new_session=not debug,", "start_new_session=False,", "test_faults.py::test_terminal_interrupt_reaches_one_process"),
    Mutant("agent", "self._attempts += 1", "pass", "test_faults.py::test_last_attempt_is_the_cause"),
    Mutant("log_specs", "or not on_console", "", "test_ranks.py::test_output[forkserver]"),
    Mutant("rendezvous", '_open_store("127.0.0.1")', '_open_store("0.0.0.0")', "test_faults.py::test_store_is_on_loopback_only"),
    Mutant("payload", "exec(code, module.__dict__)", "pass", "test_ranks.py::test_config[forkserver]"),
    Mutant("payload", "sys.argv[:] = self.argv", "pass", "test_ranks.py::test_process_is_fresh[forkserver]"),
    Mutant("payload", "logging.Logger.manager.loggerDict[MAIN]", "_ = {}; _[MAIN]", "test_ranks.py::test_output[forkserver]"),
    Mutant("payload", "HydraConfig.instance().cfg = work.hydra_config", "pass", "test_ranks.py::test_config[forkserver]"),
    Mutant("pickling", "marshal.loads(code)", "marshal.loads(code).replace(co_filename='')", "test_seams.py::test_closure_keeps_its_file_name_and_its_module"),
    Mutant("freshness", 'sys.modules["torch"].default_generator.seed()', "pass", "test_ranks.py::test_random_state[forkserver-torch]"),
    Mutant("freshness", "weakref.finalize._registered_with_atexit = False", "pass", "test_ranks.py::test_all_jobs_ran[fork]"),
    Mutant("freshness", "atexit.register(multiprocessing.util._exit_function)", "pass", "test_ranks.py::test_exit_handlers_and_threads[fork]"),
    Mutant("wire", "if not _forking.ours:", "if False:", "test_machine_faults.py::test_child_of_a_callback_hides_no_death"),
    Mutant("signals", "or os.getpid() != self._owner", "", "test_machine_faults.py::test_child_of_a_callback_obeys_a_signal"),
    Mutant("keeper", "if self._is_in_vain():\n            return True", "pass", "test_machine_faults.py::test_process_that_the_kernel_does_not_end"),
    Mutant("keeper", "self._refusal = error", "pass", "test_machine_faults.py::test_refused_process[rank]"),
    Mutant("ranks", 'if note.status == "failed" and not rank.signalled:', 'if note.status == "failed":', "test_faults.py::test_rank_that_fails_because_it_was_stopped_is_no_failure"),
    Mutant("runner", "preconditions.check_place()", "pass", "test_bad_input.py::test_launcher_inside_a_rank"),
    Mutant("runner", "if first == job.number:", "if True:", "test_bad_input.py::test_several_jobs_in_one_directory"),
    Mutant("runner", "if job.leaves_no_files:", "if False:", "test_bad_input.py::test_no_litter"),
    Mutant("node_settings", "if (nodes and nodes != (least, most)) or least > most:", "if False:", "test_one_node_settings.py::test_what_cannot_be"),
    Mutant("outcomes", "types.TracebackType(trace, step.tb_frame, -1, step.tb_lineno)", "types.TracebackType(trace, step.tb_frame, step.tb_lasti, step.tb_lineno)", "test_faults.py::test_final_traceback_points_at_no_wrong_word"),
    Mutant("payload", "dont_inherit=True", "dont_inherit=False", "test_hostile.py::test_no_trace_of_ours"),
    Mutant("ranks", 'else 1 if self.recorded == "failed" else 0', "else 0", "test_hostile.py::test_killed_rank_is_the_cause"),
    Mutant("servers", "or server.channel.is_hung_up()", "", "test_hostile.py::test_killed_idle_server"),
    Mutant("keeper", "kill(self._agent_pid, signal.SIGKILL)", "pass", "test_hostile.py::test_stopped_agent"),
    Mutant("processes", "and (janitors or not _is_janitor(process))", "", "test_hostile.py::test_shared_memory"),
    Mutant("job_run", "self._server.patience_s = self._shutdown_timeout_s + _KEEPER_ANSWERS_S", "pass", "test_hostile.py::test_nothing_outlives_the_command"),
    Mutant("recording", 'write_document(fd, {**header, "unsendable": "its process ended when it was pickled"})', "pass", "test_hostile.py::test_cause_is_known[fatal_reduce]"),
    Mutant("worker", "_import_script(payload.Program(**program))", "payload.Program(**program).enter()", "test_hostile.py::test_exit_at_import"),
    Mutant("outcomes", "except BaseException as error:  # noqa: BLE001 - a class", "except Exception as error:  # noqa: BLE001 - a class", "test_hostile.py::test_cause_is_known[exiting_value]"),
    Mutant("hydra_job", "parent._content[name] = other", "pass", "test_sweep_hygiene.py::test_a_hundred_jobs_leave_nothing"),
    Mutant("hydra_job", "if directory is not None:", "if True:", "test_hostile.py::test_directory_that_the_task_removed"),
    Mutant("guard", "if self is Hook.on_run_start and", "if", "test_guard.py::test_run_that_goes_on"),
    Mutant("guard", "raise SystemExit(1)", "return", "test_guard.py::test_single_run_is_stopped_before_any_work"),
    Mutant("worker", "threading._shutdown()", "pass", "test_ranks.py::test_exit_handlers_and_threads[forkserver]"),
    Mutant("worker", "atexit._run_exitfuncs()", "pass", "test_ranks.py::test_exit_handlers_and_threads[forkserver]"),
    Mutant("recording", "if type(rebuilt) is not type(error):", "if False:", "test_faults.py::test_failing_rank[changing_error]"),
    Mutant("recording", "write_error_file(header, self._error_file)", "pass", "test_settings.py::test_error_file"),
    Mutant("recording", "if self._what_is_open() != self._files:", "if False:", "test_faults.py::test_ranks_that_disturb_the_launcher"),
    Mutant("recording", "if os.getpid() != self._pid:", "if False:", "test_faults.py::test_ranks_that_disturb_the_launcher"),
    Mutant("processes", "self._mask = signal.pthread_sigmask(signal.SIG_SETMASK, [])", "self._mask = []", "test_faults.py::test_app_started_with_signals_blocked"),
    Mutant("recording", "BaseException.with_traceback(each, None)", "pass", "test_faults.py::test_failing_rank[deep]"),
    Mutant("runner", "open_standard_streams()", "pass", "test_faults.py::test_closed_standard_streams[fork-<&- >&-]"),
    Mutant("job_run", "self._end_by_force()", "pass", "test_faults.py::test_stopped_process_is_no_obstacle[keeper]"),
    Mutant("rules", "and name not in _UNFIT", "", "test_settings.py::test_value_that_would_break_the_launcher"),
    Mutant("rank_logging", 'handler["mode"] = "a" + handler["mode"][1:]', "pass", "test_differential.py"),
    Mutant("job_files", "if global_rank == 0:", "if True:", "test_ranks.py::test_output[forkserver]"),
    Mutant("job_files", ".mkdir()\n            return root", ".mkdir(exist_ok=True)\n            return root", "test_hostile.py::test_folder_that_another_run_takes_first"),
    Mutant("jobs", "signal.raise_signal(watch.received)", "pass", "test_faults.py::test_signal_stops_job_and_sweep[2]"),
    Mutant("plans", "{} if nproc == 1 else", "{} if False else", "test_settings.py::test_thread_limit_of_the_user_wins"),
    Mutant("hydra_job", "payload.evaluate_cached_resolvers(self.config)", "pass", "test_ranks.py::test_config[forkserver]"),
    Mutant("hydra_job", "self._context.callbacks.on_job_end(config=self.config, job_return=result)", "pass", "test_faults.py::test_killed_server"),
    Mutant("log_specs", 'any(name.startswith("duplicate_") for name in settings["launch_config"])', "False", "test_output.py::test_torchs_filters_of_teed_lines"),
    Mutant("single", "payload.evaluate_cached_resolvers(config)", "pass", "test_single_runs.py::test_ranks_of_a_single_run[forkserver]"),
    Mutant("single", "self.signum = watch.received", "pass", "test_single_runs.py::test_signal_stops_a_single_run[2]"),
    Mutant("single", "JobRunner(config, is_single=True)", "JobRunner(config)", "test_single_runs.py::test_directory_that_cannot_be_made"),
    Mutant("entry", 'write(f"{error}\\n")\n            raise SystemExit(1) from None', "write('')",  "test_single_runs.py::test_bad_setting_of_a_single_run"),
    Mutant("payload", "decorator._run_hydra = guard.starting = stop", "decorator._run_hydra = stop", "test_single_runs.py::test_script_without_a_guard"),
    Mutant("external", 'arguments["overrides"].append(f"hydra.run.dir={quoted}")', "pass", "test_external_ranks.py::test_restarted_ranks_meet_the_same_directory[one_node-1]"),
    Mutant("external", "os.environ.update({**place.variables, MARK: place.mark})", "os.environ.update(place.variables)", "test_external_ranks.py::test_app_started_by_a_rank_is_no_rank[srun]"),
    Mutant("launched", "and pid != str(os.getpid())", "", "test_external_ranks.py::test_two_task_functions_in_a_row[torchrun]"),
    Mutant("overlay", 'differences = list(_differences(values, own, ""))', "differences = []", "test_external_ranks.py::test_configs_of_another_structure"),
    Mutant("tails", "*lines, rest = _LINE_END.split(chunk)", "lines, rest = [chunk], b''", "test_output.py::test_teed_lines_are_whole"),
    Mutant("tails", 'self.fd = os.open(f"/dev/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)', 'self.fd = os.open(f"/dev/fd/{number}", os.O_WRONLY | os.O_NOCTTY)', "test_output.py::test_console_that_takes_nothing"),
    Mutant("external", "caches = [_shared_values(each) for each in configs]", "caches = [{}, {}]", "test_external_ranks.py::test_ranks_share_config_and_directory[srun]"),
    Mutant("external", '**job["env_set"]', "**{}", "test_external_ranks.py::test_ranks_share_config_and_directory[srun]"),
    Mutant("external", "recording.write_error_file(recording.describe(error), self._kept.error_file)", "pass", "test_external_ranks.py::test_failing_rank[torchrun]"),
    Mutant("external", "lambda *_: os._exit(status)", "signal.SIG_IGN", "test_external_ranks.py::test_rank_that_waits_for_another_to_leave_hears_a_signal"),
    Mutant("external", "problem = printable(str(error)) or type(error).__name__", "raise", "test_external_ranks.py::test_rank_that_cannot_log"),
    Mutant("restarts", "{next(_calls)}", "0", "test_external_ranks.py::test_two_task_functions_in_a_row[torchrun]"),
    Mutant("meeting", 'if message["token"] != token:', "if False:", "test_external_ranks.py::test_ports_of_others"),
    Mutant("meeting", 'if answer["token"] == greeting["token"]:', "if True:", "test_external_ranks.py::test_ports_of_others"),
    Mutant("meeting", "limit = Deadline(self._limit_s)\n        heard", "limit = Deadline(1000)\n        heard", "test_external_ranks.py::test_rank_0_that_is_stopped[srun]"),
    Mutant("meeting", "raise self._lost(rank) from None\n        return heard", "continue\n        return heard", "test_external_ranks.py::test_rank_that_is_lost_while_the_others_wait"),
    Mutant("tagged", "if not (isinstance(kind, type) and issubclass(kind, Enum)):", "if False:", "test_meeting.py::test_nothing_but_loaded_enums"),
    Mutant("entry", 'OmegaConf.select(node, "launcher._target_")', "node.launcher._target_", "test_single_runs.py::test_app_without_a_launcher"),
    Mutant("entry", "_stand_where(in_hydra, task_function, caller)", "pass", "test_single_runs.py::test_task_that_is_an_object"),
    Mutant("entry", "drop_own_frames(error)", "pass", "test_single_runs.py::test_plain_run_shows_no_frame_of_ours"),
    Mutant("entry", "charge, guard.in_charge = guard.in_charge, None", "charge = guard.in_charge", "test_external_ranks.py::test_call_with_a_config_is_no_run"),
    Mutant("slots", "if lent < self._places", "if True", "test_pool.py::test_jobs_share_devices"),
    Mutant("slots", "is_full or", "", "test_pool.py::test_number_of_jobs_is_a_limit"),
    Mutant("lending", "if not there or ranks <= there:", "if True:", "test_pool.py::test_job_that_never_fits"),
    Mutant("runner", "if settings.sharing != self._settings.sharing:", "if False:", "test_pool.py::test_settings_of_the_sweep_that_differ"),
    Mutant("keeper", 'os.sched_setaffinity(0, self._plan["cores"])', "pass", "test_pool.py::test_jobs_share_cores"),
    Mutant("batches", "key=lambda job: -job.ranks", "key=lambda job: job.number", "test_pool.py::test_jobs_of_different_sizes"),
    Mutant("batches", "if self._sweep.failed_fast is not None:", "if False:", "test_pool.py::test_fail_fast"),
    Mutant("batches", 'self._stop_all(FailFastError("stopped", *self._sweep.failed_fast))', "pass", "test_pool.py::test_fail_fast"),
    Mutant("tries", "self.number += 1", "pass", "test_pool.py::test_retries"),
    Mutant("tails", "self._can_lock = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(number)", "self._can_lock = False", "test_pool.py::test_output_in_pieces"),
    Mutant("tails", "return self._writer is writer", "return True", "test_pool.py::test_output_in_pieces"),
    Mutant("job_run", "return self._is_failing or is_ending or has_ended", "return is_ending or has_ended", "test_pool.py::test_own_failure_comes_first"),
    Mutant("batches", "            self._end_all(error)\n", "", "test_pool.py::test_sweep_that_cannot_go_on"),
    Mutant("job_run", "        if self._owns_server:", "        if self.is_over and self._owns_server:", "test_pool.py::test_callback_that_leaves"),
    Mutant("jobs", "with suppress(JobStoppedError):", "with suppress(ZeroDivisionError):", "test_pool.py::test_signal_while_devices_are_counted"),
    Mutant("runner", "settings.of_single_run() if self._is_single", "settings if self._is_single", "test_pool.py::test_single_run_has_the_whole_machine"),
    Mutant("runner", "or not self.tries_again(job, tries, ended)", "or True", "test_pool.py::test_retries_of_a_single_run"),
    Mutant("tries", "STOPPED | _IN_VAIN", "STOPPED", "test_pool.py::test_retries_in_vain"),
    Mutant("lending", '(wanted != "cpu" and accelerators().count)', "accelerators().count", "test_pool.py::test_jobs_on_cores_beside_accelerators"),
    Mutant("job_run", "(self._cannot_go_on is not None and self._server.dead)", "self._cannot_go_on is not None", "test_pool.py::test_lost_word_of_a_job"),
    Mutant("runner", "has_terminal and any(run.server.ready for run in runs)", "has_terminal", "test_looking.py::test_interrupt_before_the_debugged_rank_is_there"),
    Mutant("dry_run", "*_where_config_is(sys.argv[1:]), ", "", "test_looking.py::test_dry_run_names_the_config_and_lent_devices"),
    Mutant("runner", "k == lent or ", "", "test_looking.py::test_dry_run_names_the_config_and_lent_devices"),
    Mutant("machine", "[here, *here.parents]", "[here]", "test_one_node_settings.py::test_cores"),
    Mutant("servers", "is_ready = self.is_ready()", "is_ready = self.ready", "test_pool.py::test_callback_that_leaves"),
    Mutant("batches", "if running.ended is not None:  # it was", "if False:  # it was", "test_pool.py::test_mistake_of_ours_at_a_jobs_end"),
    Mutant("job_run", "self._has_completed = True", "pass", "test_pool.py::test_completed_job_stays_so"),
    Mutant("keeper", "if self._ranks.have_finished() else stopped", "if False else stopped", "test_pool.py::test_signal_after_a_job_has_completed"),
    Mutant("keeper", "ask=not succeeded or self._stopping is not None", "ask=not succeeded", "test_pool.py::test_signal_after_a_job_has_completed"),
    Mutant("job_run", "and not self._failed_first", "", "test_pool.py::test_signal_to_a_job_that_fails"),
    Mutant("outcomes", "return None, UnsendableValueError(problem)", "return None, ValueError(problem)", "test_pool.py::test_value_that_cannot_be_rebuilt"),
    Mutant("errors", "    try:\n        return printable(str(error))\n    except Exception", "    try:\n        return printable(str(error))\n    except ZeroDivisionError", "test_pool.py::test_retries_of_an_exception_without_words"),
    Mutant("tails", "if self._is_stuck.passed and", "if False and", "test_pool.py::test_console_that_another_has_locked"),
    Mutant("jobs", "for job in sorted(jobs, key=lambda job: -job.ranks):", "for job in jobs:", "test_looking.py::test_dry_run_places_as_the_run_would"),
    Mutant("dry_run", "        sets |= {", "        _ = {", "test_looking.py::test_dry_run_with_virtual_local_rank"),
    Mutant("jobs", "self._await_remains(self._folder)", "pass", "test_resume.py::test_ranks_that_outlive_their_launching_process"),
    Mutant("claims", "                path.unlink()\n                raise", "                raise", "test_resume.py::test_claim_that_cannot_be_written"),
    Mutant("claims", "os.O_EXCL | ", "", "test_resume.py::test_claims_at_one_moment"),
    Mutant("claims", "if is_own or not is_alive(facts, path):", "if True:", "test_resume.py::test_second_sweep_in_a_directory"),
    Mutant("claims", "< _SILENT_S", "< 0", "test_resume.py::test_sweep_of_another_machine"),
    Mutant("processes", 'return None if state in (b"Z", b"X") else', "return", "test_resume.py::test_killed_launching_process_that_nobody_waits_for"),
    Mutant("resume", "if each.config == mark(config)]", "]", "test_resume.py::test_changed_config"),
    Mutant("resume", 'if event.get("seal") != events.seal(event):', "if False:", "test_resume.py::test_edited_record"),
    Mutant("resume", 'elif "type" in event:', "elif False:", "test_resume.py::test_value_that_no_record_holds"),
    Mutant("resume", 'self._forget(event.get("output_dir"), number)', "pass", "test_resume.py::test_files_written_over"),
    Mutant("resume", "if app not in (name, None):", "if False:", "test_resume.py::test_records_of_another_app"),
    Mutant("jobs", "problems += self._collisions(jobs)", "pass", "test_resume.py::test_jobs_in_another_order"),
    Mutant("tails", "key = there.st_dev, there.st_ino", "key = there.st_dev, console", "test_output.py::test_console_that_takes_nothing"),
    Mutant("tails", "                    busy()", "                    pass", "test_output.py::test_console_that_takes_nothing"),
    Mutant("keeper", "self._ranks.ask_for_stacks()", "pass", "test_pool.py::test_time_limit[forkserver]"),
    Mutant("keeper", "self._stacks.within(_STACKS_S)", "self._stacks.within(1000)", "test_pool.py::test_time_limit_of_a_rank_that_is_stopped"),
    Mutant("ranks", "log.write(_STACKS_TITLE + text)", "pass", "test_pool.py::test_time_limit[spawn]"),
    Mutant("job_run", "self._time.within(self._timeout_s)", "pass", "test_pool.py::test_time_limit[fork]"),
    Mutant("events", "_line_end(fd) + line", "line", "test_events.py::test_second_run_in_a_directory"),
    Mutant("events", '.split(b"\\n")[:-1]', '.split(b"\\n")', "test_events.py::test_file_cut_anywhere"),
    Mutant("events", 'events = [event] if event["event"] == "queued" else [*events, event]', "events = [*events, event]", "test_events.py::test_second_run_in_a_directory"),
    Mutant("jobs", "is_project and self._config.hydra.output_subdir is None", "False", "test_events.py::test_no_events_where_no_files_are_wanted"),
    Mutant("keeper", "self._ranks.tell_if_all_are_there()", "pass", "test_events.py::test_events_of_a_sweep"),
    Mutant("preconditions", "if there != Path(value).absolute():", "if False:", "test_bad_input.py::test_sweep_directory_that_cannot_be_made"),
    Mutant("batches", "for number in sorted(self._returns)]", "for number in self._returns]", "test_sweepers.py::test_optuna"),
    Mutant("dry_run", "sets = {**variables, **_elastics(settings, ranks)}", "sets = {**_elastics(settings, ranks)}", "test_looking.py::test_dry_run_says_what_ranks_get"),
    Mutant("runner", "and not settings.sharing.dry_run", "", "test_looking.py::test_dry_run_says_what_ranks_get"),
    Mutant("servers", "start_new_session=not debug,", "start_new_session=True,", "test_looking.py::test_debug_rank_has_the_terminal[forkserver]"),
    Mutant("signals", "if signum == signal.SIGINT and self.interrupts_are_a_ranks:", "if False:", "test_looking.py::test_debug_rank_has_the_terminal[spawn]"),
    Mutant("settings", "signals=signals, timeout_s=None)", "signals=signals)", "test_looking.py::test_debug_rank_has_the_terminal[forkserver]"),
    Mutant("signals", "not in (signal.SIG_IGN, None)", "is not None", "test_faults.py::test_ignored_hangup_stays_ignored"),
    Mutant("progress", 'text = f"\\x1b7', 'text = f"', "test_progress.py::test_table"),
    Mutant("progress", 'return closing + room + f"', 'return closing + f"', "test_progress.py::test_table"),
    Mutant("progress", "shape != self._shape", "self._shape is None", "test_progress.py::test_table_of_another_size"),
    Mutant("progress", "                os.write(1, text.encode())", "                pass", "test_progress.py::test_table_of_another_size"),
    Mutant("progress", 'os.isatty(1) and os.environ.get("TERM", "dumb") != "dumb"', "os.isatty(1)", "test_progress.py::test_no_table"),
    Mutant("progress", 'self._is_told = kind != "none"', "self._is_told = True", "test_progress.py::test_no_terminal"),
    Mutant("tables", "sorted(jobs, key=urgency)[:count]", "jobs[:count]", "test_cli.py::test_hundreds_of_jobs"),
    Mutant("telling", "char if char.isprintable() else", "char if char else", "test_cli.py::test_hostile_texts"),
    Mutant("report", 'for char in "<>&":', 'for char in "&":', "test_cli.py::test_hostile_texts"),
    Mutant("report", "for lane in span.where or", "for lane in span.where[:1] or", "test_cli.py::test_report_is_what_ranks_recorded"),
    Mutant("sweep_state", "            job.lose(_last_sign(", "            (_last_sign(", "test_cli.py::test_sweep_that_runs_and_is_killed"),
    Mutant("job_state", "0 <= value <= _MOST_S", "True", "test_cli.py::test_edited_records"),
    Mutant("sweep_state", "job.queued >= (sweep.started or 0.0)", "True", "test_cli.py::test_second_sweep_in_a_directory"),
    Mutant("events", "0 <= when <= _LATEST", "True", "test_cli.py::test_edited_records"),
    Mutant("events", "suppress(ValueError, RecursionError)", "suppress(ValueError)", "test_cli.py::test_edited_records"),
    Mutant("cli", "signal.signal(signal.SIGPIPE, signal.SIG_DFL)", "pass", "test_cli.py::test_reader_that_goes_away"),
    Mutant("cli", "if logs.is_over or not chosen.follow:", "if True:", "test_cli.py::test_logs_that_are_followed"),
    Mutant("job_logs", "file.seek(self._offsets.get(path, 0))", "pass", "test_cli.py::test_logs_that_are_followed"),
    Mutant("resume", "alike.sort(key=lambda each: each.number != number)", "pass", "test_resume.py::test_alike_jobs_take_their_own"),
    Mutant("jobs", "            claim.withdraw()", "            claim.release()", "test_resume.py::test_refused_sweep_leaves_no_claim"),
    Mutant("resume", "self._last[key] = name", "self._last.setdefault(key, name)", "test_resume.py::test_what_completed_is_taken_over"),
    Mutant("progress", "            self._is_told = False", "            pass", "test_progress.py::test_mistake_of_ours_ends_no_sweep"),
    Mutant("claims", "return time.time() - touched", "return 0.0", "test_resume.py::test_directory_that_cannot_be_written_by_who_looks"),
    Mutant("cli", "target = os.path.realpath(chosen.output)", "target = chosen.output", "test_cli.py::test_report_is_what_ranks_recorded"),
    Mutant("tails", "while not console.lock(late) and not late.passed:", "while False:", "test_progress.py::test_line_that_waits_for_anothers_end"),
    Mutant("tables", "    if cut > room:", "    if False:", "test_cli.py::test_narrow_terminal"),
    Mutant("ranks", '"folders": folders', '"folders": folders[::-1]', "test_cli.py::test_status_is_what_ranks_recorded"),
    Mutant("progress", "if is_late:", "if False:", "test_progress.py::test_table_after_another_program"),
    Mutant("sweep_state", 'if event["job"] == job.number', "if event", "test_cli.py::test_events_of_another_job"),
    Mutant("sweep_state", "if number is not None:  #", "if claim:  #", "test_cli.py::test_claim_that_is_being_written"),
    Mutant("sweep_state", "                last_sign = max(", "                max(", "test_cli.py::test_end_of_a_lost_job"),
    Mutant("sweep_state", "[launching, *map(_touched, files)]", "[launching]", "test_cli.py::test_end_of_a_lost_job"),
    Mutant("job_state", 'self.state, self.retry = "running",', '_, self.retry = "running",', "test_cli.py::test_job_between_two_tries"),
    Mutant("events", "parse_float=_finite, parse_constant=_finite", "", "test_cli.py::test_edited_records"),
    Mutant("batches", '{"ran_as": before.ran_as, **before.ran}', '{"ran_as": before.ran_as}', "test_cli.py::test_job_that_was_taken_over"),
    Mutant("resume", 'or "ran_as" in event:', "and event:", "test_cli.py::test_job_that_was_taken_over"),
    Mutant("cli", "if sys.stdout.isatty() else None", "if console.is_terminal else None", "test_cli.py::test_status_as_a_table"),
    Mutant("cli", "or console.is_dumb_terminal", "", "test_cli.py::test_watch"),
    Mutant("cli", "if logs.waits_for and not is_told:", "if False:", "test_cli.py::test_logs_that_are_followed"),
    Mutant("report", "job.rank is None or", "True or", "test_cli.py::test_report_is_what_ranks_recorded"),
    Mutant("link", "if self._beat.remaining_s is None or self._beat.passed:", "if False:", "test_node_faults.py::test_job_longer_than_the_silence_that_is_borne"),
    Mutant("link", "self.time.within(lost_after_s)", "pass", "test_links.py::test_node_that_falls_silent"),
    Mutant("link", 'return hmac.new(os.environ.get(SECRET, "").encode(),', 'return hmac.new(b"",', "test_node_faults.py::test_nodes_that_differ[secret]"),
    Mutant("hub", "if facts[fact] != own[fact]", "if False", "test_node_faults.py::test_nodes_that_differ[torch]"),
    Mutant("hub", "guest.lives(_GREETING_S)\n        guest.line.put", "guest.line.put", "test_links.py::test_guest_that_says_nothing"),
    Mutant("hub", "        if len(self._guests) > _MOST_GUESTS:", "        if False:", "test_links.py::test_too_many_guests"),
    Mutant("hub", "longest = () if peer.number else (LONGEST_GREETING,)", "longest = ()", "test_links.py::test_guest_that_says_too_much"),
    Mutant("hub", "if silent and not self._ending.passed:", "if False:", "test_links.py::test_confirmation"),
    Mutant("spoke", 'if not hmac.compare_digest(message["proof"], proof(nonce, message["welcome"])):', "if False:", "test_links.py::test_leader_that_cannot_prove_itself"),
    Mutant("spoke", "if leader.time.passed:", "if False:", "test_node_faults.py::test_link_that_is_cut_for_ever"),
    Mutant("nodes", "if self._limit.passed:\n                raise StartError(self._missing())", "pass", "test_node_faults.py::test_leader_without_followers"),
    Mutant("nodes", 'else facts["node_rank"]', "else free.pop(0)", "test_nodes.py::test_rank_0_on_the_follower"),
    Mutant("nodes", '(int(part), "") if part.isdecimal() else (-1, part)', "(0, part)", "test_links.py::test_order_of_hosts"),
    Mutant("nodes", 'facts["local_addr"] or facts.get("address", own)', 'facts.get("address", own)', "test_nodes.py::test_several_interfaces"),
    Mutant("nodes", 'if message["op"] == "left":  # lost at the last moment', "if False:", "test_links.py::test_silent_node"),
    Mutant("hub", "if not is_name or not is_rank:", "if False:", "test_links.py::test_odd_guests"),
    Mutant("hub", "why = one_line(why)[:LONGEST_REASON]", "pass", "test_links.py::test_odd_words"),
    Mutant("job_logs", "self._first = 0  # it may", "pass  # it may", "test_cli.py::test_logs_that_are_followed"),
    Mutant("leading", "self._round > self._max_restarts", "False", "test_nodes.py::test_too_many_failures"),
    Mutant("leading", 'self._order(other, {"op": "regroup"})', "pass", "test_nodes.py::test_too_many_failures"),
    Mutant("leading", "if len(self._finished) == self._count:", "if True:", "test_nodes.py::test_late_failure"),
    Mutant("leading", "if self._leader.lost is not None and not self._is_ending:", "if False:", "test_node_faults.py::test_host_that_dies[follower]"),
    Mutant("leading", "if error is None and self._leader.rank != 0:", "if False:", "test_nodes.py::test_rank_0_on_the_follower"),
    Mutant("leading", "for host, part in zip(self._leader.hosts, by_node, strict=True)", "for host, part in zip(self._leader.hosts[::-1], by_node, strict=True)", "test_nodes.py::test_no_shared_disk"),
    Mutant("following", "self._lose(error)\n        if self._follower.over", "pass\n        if self._follower.over", "test_node_faults.py::test_link_that_is_cut_for_ever"),
    Mutant("following", 'environ = {**os.environ, **own, **job["env_set"]}', "environ = {**os.environ}", "test_nodes.py::test_one_sweep"),
    Mutant("team", 'if message["op"] != "completed":', "if False:", "test_nodes.py::test_one_sweep"),
    Mutant("rendezvous", "return int(self.others_wait)", "return 0", "test_nodes.py::test_too_many_failures"),
    Mutant("node_settings", "(None if rank is None else rank == 0) if leads is None else leads", "None if leads is None else leads", "test_one_node_settings.py::test_who_leads"),
    Mutant("claims", 'and type(found.get("pid")) is int', "", "test_cli.py::test_claim_with_an_odd_process_number"),
    Mutant("job_logs", "if self._rank < len(job.hosts) else", "if False else", "test_nodes.py::test_no_shared_disk"),
]  # fmt: skip


def survives(mutant: Mutant) -> str | None:
    """Make the breakage in this process's copy, run its test, and say what is wrong if it passes."""
    file = COPY / PACKAGE / f"{mutant.module}.py"
    source = file.read_text()
    if source.count(mutant.line) < 1:
        return f"{mutant.module}: {mutant.line!r} does not stand there any more"
    file.write_text(source.replace(mutant.line, mutant.broken, 1))
    environ = {"PYTHONPATH": str(COPY / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        result = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", mutant.test],
            cwd=COPY / "tests",
            env={**os.environ, **environ, "TEST_HANG_S": str(HANG_S)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        file.write_text(source)
    if result.returncode == 1:
        return None
    what = "passes" if result.returncode == 0 else f"could not run:\n{result.stdout}{result.stderr}"
    return f"{mutant.module}: {mutant.line!r} -> {mutant.broken!r}: {mutant.test} {what}"


def make_copy(folder: str) -> None:
    """Give this process a copy of the project."""
    global COPY  # noqa: PLW0603 - one for each process
    COPY = Path(tempfile.mkdtemp(dir=folder)) / "copy"
    shutil.copytree(ROOT, COPY, ignore=shutil.ignore_patterns(".venv*", ".git", "__pycache__"))


def main(words: list[str]) -> int:
    """Run the mutants whose text holds one of the words, or all."""
    chosen = [m for m in MUTANTS if not words or any(word in " ".join(m) for word in words)]
    wrong = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(AT_ONCE, initializer=make_copy, initargs=(folder,)) as processes,
    ):
        for mutant, problem in zip(chosen, processes.map(survives, chosen), strict=True):
            print("noticed " if problem is None else "SURVIVES", *mutant[:2], flush=True)
            wrong += [problem] if problem else []
    print("\n".join([*wrong, f"{len(chosen) - len(wrong)} of {len(chosen)} breakages noticed"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
