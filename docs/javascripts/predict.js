"use strict";
// "Predict the next action": the timeline is hidden from a moment on, and the reader says what one stage
// does next. The answer is the plan's; a wrong one is explained by what it lacks.

(() => {
  const MM = (globalThis.MM ||= {});
  const make = MM.make;

  MM.Quiz = class Quiz {
    constructor(player) {
      this.player = player;
      this.stage = make("select", { onchange: () => this.restart(Number(this.stage.value)) });
      this.question = make("p", { class: "mmp-question", tabindex: "-1" });
      this.buttons = make("div", { class: "mmp-options", role: "group", "aria-label": "Answers" });
      this.verdict = make("p", { class: "mmp-verdict", role: "status" });
      this.score = make("span", { class: "mmp-score" });
      this.element = make("section", { class: "mmp-quiz", "aria-label": "Predict the next action" },
        make("div", { class: "mmp-quizhead" }, make("label", {}, "Stage ", this.stage), this.score), this.question, this.buttons, this.verdict);
    }

    restart(rank = null) {
      const { p } = this.player.state;
      this.rank = Math.min(rank ?? (this.rank ?? 1), p - 1);
      this.place = this.right = this.wrong = 0;
      this.stage.replaceChildren(...Array.from({ length: p }, (_, stage) => make("option", { value: stage, selected: stage === this.rank }, String(stage))));
      this.verdict.replaceChildren();
      this.ask();
    }

    get work() {
      return this.player.step.work[this.rank];
    }

    ask() {
      const { player, work, place } = this, { step } = player;
      this.isMissed = false;
      const isOver = place >= work.length;
      // When the stage is free: its next action begins then, or waits.
      this.t = place ? step.endOf(work[place - 1]) : 0;
      const t = isOver ? null : this.t;
      Object.assign(player.timeline.marks, { t, hideFrom: t === null ? null : (cell) => cell.s >= t, ask: t === null ? null : { rank: this.rank, t } });
      player.showTime();
      player.timeline.draw();
      this.score.textContent = `${place} of ${work.length}, ${this.wrong} wrong`;
      if (isOver) {
        this.question.textContent = `Stage ${this.rank} is done.`;
        this.buttons.replaceChildren(atTheEnd(player, this));
        return;
      }
      this.question.replaceChildren(`Stage ${this.rank} is free at ${this.words(this.t)}. Which forward (F) or backward (B) is its `, make("b", {}, "next"), ", at once or after a wait?");
      this.buttons.replaceChildren(...this.options().map((option) =>
        make("button", { type: "button", onclick: (event) => this.answer(option, event.currentTarget) }, player.explain.nameOf(option))));
    }

    words(t) {
      return String(Math.round(t * 1000) / 1000);
    }

    // The next of each kind and chunk, and the mistakes people make.
    options() {
      const { M, v } = this.player.state, done = this.work.slice(0, this.place), found = [];
      const add = (kind, mb, chunk) => {
        if (mb >= 0 && mb < M && !found.some((o) => o.kind === kind && o.mb === mb && o.chunk === chunk) && !this.isDone({ kind, mb, chunk }))
          found.push({ kind, rank: this.rank, mb, chunk });
      };
      const next = (kind, chunk) => done.filter((a) => a.kind === kind && a.chunk === chunk).length;
      for (let chunk = 0; chunk < v; chunk++) for (const kind of ["F", "B"]) add(kind, next(kind, chunk), chunk);
      if (v === 1) {
        add("B", next("F", 0) - 1, 0); // last in, first out
        add("F", next("F", 0) + 1, 0);
        add("B", next("B", 0) + 1, 0);
      }
      return found.sort((a, b) => (a.kind < b.kind ? 1 : a.kind > b.kind ? -1 : a.chunk - b.chunk || a.mb - b.mb));
    }

    isDone({ kind, mb, chunk }) {
      return this.work.slice(0, this.place).some((a) => a.kind === kind && a.mb === mb && a.chunk === chunk);
    }

    answer(option, button) {
      const truth = this.work[this.place];
      const name = this.player.explain.nameOf(option);
      if (option.kind === truth.kind && option.mb === truth.mb && option.chunk === truth.chunk) {
        this.right += 1;
        this.place += 1;
        const wait = this.player.step.startOf(truth) - this.t;
        const gap = this.player.step.gaps[this.rank].find((g) => g.before === truth.index);
        const words = wait > 1e-9 && gap ? ` It starts after waiting ${this.words(wait)}. ${this.player.explain.gapWords(gap)}` : "";
        this.verdict.replaceChildren(make("b", { class: "mmp-right" }, `Yes, ${name}.`), words);
        this.ask();
        (this.buttons.querySelector("button") || this.question).focus({ preventScroll: true });
        return;
      }
      if (!this.isMissed) this.wrong += 1;
      this.isMissed = true;
      button.setAttribute("aria-disabled", "true");
      button.classList.add("mmp-wrong");
      this.score.textContent = `${this.place} of ${this.work.length}, ${this.wrong} wrong`;
      this.verdict.replaceChildren(make("b", { class: "mmp-not" }, `Not ${name}.`), ` ${this.why(option, truth)}`);
    }

    // What the answer lacks: first its inputs, then its turn in the schedule.
    why(option, truth) {
      const { player, t } = this, { step, plan, state } = player, name = player.explain.nameOf(option);
      for (const need of MM.engine.needs(plan.config, option)) {
        const action = MM.engine.find(step, need), what = player.explain.nameOf(need);
        if (need.rank === this.rank && !this.isDone(need)) return `${name} needs ${what} of this very stage first: without it there are no activations to go back through.`;
        const end = step.endOf(action);
        if (need.rank !== this.rank && end > t + 1e-9) {
          const tensor = option.kind === "F" ? "activation" : "gradient";
          const isBehindTruth = truth.kind === option.kind ? "" : `, and stage ${this.rank} does not wait for it here`;
          return `${name} needs the ${tensor} that ${what} makes on stage ${need.rank}. At ${this.words(t)} that is ${step.startOf(action) < t ? "still running" : "yet to start"}${isBehindTruth}.`;
        }
      }
      return `Its inputs are there, but it is not its turn. ${this.turn(option, truth, state)}`;
    }

    turn(option, truth, { schedule, M, v, G }) {
      const { player } = this, { step } = player;
      const before = this.work.slice(0, this.place).filter((a) => a.kind === option.kind && a.chunk === option.chunk).length;
      if (option.mb !== before) return `Microbatches go through a chunk in order: ${option.kind}${before} comes before ${option.kind}${option.mb}.`;
      if (schedule === "gpipe") return `GPipe runs all ${M} forwards before the first backward.`;
      const held = this.work.slice(0, this.place).reduce((n, a) => n + (a.kind === "F" ? 1 : -1), 0);
      if (option.kind !== truth.kind) {
        const w = this.work.filter((a) => a.kind === "F" && a.phase === "warmup").length;
        if (truth.kind === "B")
          return `Stage ${this.rank} has done its ${w} warm-up forward${w === 1 ? "" : "s"} and holds ${held} microbatch${held === 1 ? "" : "es"}; now each forward is followed by a backward, so that it never holds more than ${step.peaks[this.rank]}.`;
        return `${truth.phase === "warmup" ? `Stage ${this.rank} still warms up: ${w} forwards come before its first backward` : "In steady state one forward comes before each backward"}.`;
      }
      if (v > 1) {
        const way = option.kind === "F" ? "first chunk to last" : "last chunk to first";
        return `Interleaving takes the chunks in turn, ${way}, ${G} microbatches at a time: the turn is chunk ${truth.chunk}'s.`;
      }
      return `The plan says ${player.explain.nameOf(truth)}.`;
    }
  };

  function atTheEnd(player, quiz) {
    return make("div", {}, make("p", {}, quiz.wrong ? `${quiz.right} actions, ${quiz.wrong} not at once.` : `All ${quiz.right} at once.`),
      make("button", { type: "button", onclick: () => quiz.restart((quiz.rank + 1) % player.state.p) }, "Another stage"));
  }
})();
