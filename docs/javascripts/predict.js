"use strict";
// "Predict the next action": the timeline is hidden from a moment on, and the reader says what one stage
// does next. The answer is the plan's; a wrong one is explained by what it lacks.

(() => {
  const MM = (globalThis.MM ||= {});
  const make = MM.make, say = (...words) => MM.say(...words), { number } = MM.words;

  MM.Quiz = class Quiz {
    constructor(player) {
      this.player = player;
      this.stage = make("select", { onchange: () => this.restart(Number(this.stage.value)) });
      this.question = make("p", { class: "mmp-question", tabindex: "-1" });
      this.buttons = make("div", { class: "mmp-options", role: "group", "aria-label": say("quiz.answers") });
      this.verdict = make("p", { class: "mmp-verdict", role: "status" });
      this.score = make("span", { class: "mmp-score" });
      this.element = make("section", { class: "mmp-quiz", "aria-label": say("player.predict") },
        make("div", { class: "mmp-quizhead" }, make("label", {}, `${say("replay.stage", { rank: "" })}`, this.stage), this.score), this.question, this.buttons, this.verdict);
    }

    get scene() {
      return this.player.scene;
    }

    // The actions of the stage, in order. A pair is one action.
    get work() {
      return this.scene.step.work[this.rank];
    }

    restart(rank = null) {
      const { p } = this.scene;
      this.rank = Math.min(rank ?? this.rank ?? 1, p - 1);
      this.place = this.right = this.wrong = 0;
      this.stage.replaceChildren(...Array.from({ length: p }, (_, stage) => make("option", { value: stage, selected: stage === this.rank }, String(stage))));
      this.verdict.replaceChildren();
      this.ask();
    }

    ask() {
      const { player, work, place, scene } = this;
      this.isMissed = false;
      const isOver = place >= work.length;
      // When the stage is free: its next action begins then, or waits.
      this.t = place ? scene.step.endOf(work[place - 1]) : 0;
      const t = isOver ? null : this.t;
      Object.assign(player.timeline.marks, { t, hideFrom: t === null ? null : (cell) => cell.s >= t, ask: t === null ? null : { track: this.rank, t } });
      player.showTime();
      player.timeline.draw();
      this.showScore();
      if (isOver) {
        this.question.textContent = say("quiz.done", { rank: this.rank });
        this.buttons.replaceChildren(this.atTheEnd());
        return;
      }
      const letters = scene.plan.letters.map((letter) => `${say(`kind.${scene.plan.kinds[letter].name}`)} (${letter})`).join(", ");
      this.question.replaceChildren(...MM.sentence("quiz.question", { rank: this.rank, t: number(this.t), letters, next: make("b", {}, say("quiz.next")) }));
      this.buttons.replaceChildren(...this.options().map((option) => make("button", { type: "button", onclick: (event) => this.answer(option, event.currentTarget) }, scene.name(option))));
    }

    showScore() {
      this.score.textContent = say("quiz.score", { place: this.place, of: this.work.length, wrong: this.wrong });
    }

    // What was done so far, pairs apart: [{kind, mb, chunk}].
    done() {
      return this.work.slice(0, this.place).flatMap((action) => MM.engine.partsOf(action));
    }

    // The next of each kind and chunk, the truth, and the mistakes people make.
    options() {
      const { scene } = this, truth = this.work[this.place], all = this.work.flatMap((action) => MM.engine.partsOf(action)), done = this.done(), found = [];
      const same = (a, b) => scene.name(a) === scene.name(b);
      const add = (what) => what && !found.some((other) => same(other, what)) && !done.some((other) => same(other, what)) && found.push(what);
      for (let chunk = 0; chunk < scene.v; chunk++) for (const kind of scene.plan.letters) {
        const ofKind = all.filter((part) => part.kind === kind && part.chunk === chunk), next = done.filter((part) => part.kind === kind && part.chunk === chunk).length;
        add(ofKind[next]);
        if (scene.v > 1 || kind === "F") continue;
        add(ofKind[done.filter((part) => part.kind === "F").length - 1]); // last in, first out
        add(ofKind[next + 1]);
      }
      if (scene.v === 1) {
        const forwards = all.filter((part) => part.kind === "F"), next = done.filter((part) => part.kind === "F").length;
        add(forwards[next + 1]);
      }
      add(truth);
      const order = (part) => scene.plan.letters.indexOf(part.kind);
      return found.map((part) => ({ ...part, rank: this.rank })).sort((a, b) => order(a) - order(b) || a.chunk - b.chunk || a.mb - b.mb);
    }

    answer(option, button) {
      const { scene } = this, truth = this.work[this.place], name = scene.name(option);
      if (name === scene.name(truth)) {
        this.right += 1;
        this.place += 1;
        const gap = scene.gapBefore(truth), wait = gap ? say("quiz.waits", { time: MM.words.units(gap.end - gap.start) }) : "";
        this.verdict.replaceChildren(make("b", { class: "mmp-right" }, say("quiz.yes", { name })), gap ? ` ${wait} ${this.player.explain.gapWords(scene, gap)}` : "");
        this.ask();
        (this.buttons.querySelector("button") || this.question).focus({ preventScroll: true });
        return;
      }
      if (!this.isMissed) this.wrong += 1;
      this.isMissed = true;
      button.setAttribute("aria-disabled", "true");
      button.classList.add("mmp-wrong");
      this.showScore();
      this.verdict.replaceChildren(make("b", { class: "mmp-not" }, say("quiz.not", { name })), ` ${this.why(option, truth)}`);
    }

    // What the answer lacks: first its inputs, then its turn in the schedule.
    why(option, truth) {
      const { scene, t } = this, { step, plan } = scene, name = scene.name(option), done = this.done().map((part) => scene.name(part));
      for (const need of MM.engine.needs(plan, option)) {
        const what = scene.name(need), end = step.endOf(need);
        if (need.rank === this.rank && !MM.engine.partsOf(need).every((part) => done.includes(scene.name(part)))) return say("quiz.own", { name, what });
        if (need.rank === this.rank || end <= t + 1e-9) continue;
        const isBehindTruth = truth.kind === option.kind ? "" : say("quiz.behind", { rank: this.rank });
        const state = say(step.startOf(need) < t ? "quiz.running" : "quiz.later");
        return say(option.kind === "F" ? "quiz.activation" : "quiz.gradient", { name, what, rank: need.rank, t: number(t), state, behind: isBehindTruth });
      }
      return `${say("quiz.turn")} ${this.turn(option, truth)}`;
    }

    turn(option, truth) {
      const { scene, player } = this, { step, plan } = scene, { schedule, M, G } = player.state, done = this.done();
      const before = done.filter((part) => part.kind === option.kind && part.chunk === option.chunk).length;
      if (plan.name || scene.plan.letters.length > 2) return say("quiz.plan", { what: scene.name(truth) });
      if (option.mb !== before) return say("quiz.order", { first: `${option.kind}${before}`, second: `${option.kind}${option.mb}` });
      if (schedule === "gpipe") return say("quiz.gpipe", { M });
      if (schedule === "breadth-first") return say("quiz.breadth", { M });
      if (option.kind !== truth.kind) {
        const w = this.work.filter((a) => a.kind === "F" && a.phase === "warmup").length, held = done.reduce((count, part) => count + plan.kinds[part.kind].holds, 0);
        if (truth.kind !== "F") return say("quiz.warm", { rank: this.rank, n: w, held, peak: step.peaks[this.rank] });
        return say(truth.phase === "warmup" ? "quiz.still" : "quiz.steady", { rank: this.rank, n: w });
      }
      if (scene.v > 1) return say(option.kind === "F" ? "quiz.chunks.forward" : "quiz.chunks.backward", { G, chunk: truth.chunk });
      return say("quiz.plan", { what: scene.name(truth) });
    }

    atTheEnd() {
      return make("div", {}, make("p", {}, this.wrong ? say("quiz.end", { right: this.right, wrong: this.wrong }) : say("quiz.end.all", { right: this.right })),
        make("button", { type: "button", onclick: () => this.restart((this.rank + 1) % this.scene.p) }, say("quiz.another")));
    }
  };
})();
