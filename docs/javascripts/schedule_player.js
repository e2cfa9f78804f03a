"use strict";
// The schedule player: choose a plan and its costs, see when everything happens, ask why, compare it with
// another one, follow a microbatch. Plans come from orders.js (the planner), times from engine.js, the view
// from model.js, the picture from timeline.js, choices from controls.js, words from explain.js; a reader's own
// plan from workbench.js, once asked for.

(() => {
  const MM = (globalThis.MM ||= {});
  const make = MM.make, say = (...words) => MM.say(...words);
  const OTHER = "b|"; // before the ids of the schedule that is compared with
  const PREDICT = "javascripts/predict.js";

  const { round, number } = MM.words;

  MM.mountPlayer = async function mountPlayer(root, options) {
    const player = new Player(root, options);
    root.mmPlayer = player;
    await player.start();
    return player;
  };

  class Player {
    constructor(root, options) {
      this.root = root;
      this.options = options;
      this.isSmall = options.small !== undefined;
      this.isFew = options.few !== undefined;
      this.state = { ...MM.PlayerState.DEFAULTS };
      const given = { schedule: options.schedule, p: options.pp, M: options.microbatches, v: options.vpp, G: options.group,
        f: options.forward, b: options.backward, c: options.message, cap: options.cap, vs: options.compare };
      for (const [name, value] of Object.entries(given)) if (value) this.state[name] = typeof MM.PlayerState.DEFAULTS[name] === "string" ? value : Number(value);
      this.initial = { ...this.state };
      this.address = new MM.Address("player", MM.PlayerState.CHECKS, options.isFirst);
      root.id ||= this.address.name;
      this.build();
    }

    async start() {
      await this.openAsAsked(this.options.predict !== undefined);
      const { chosen } = this.timeline.marks;
      if (this.options.choose === "gap" && !chosen && !this.following) this.timeline.choose(this.scene.step.gaps.find((gaps) => gaps.length)?.[0].id ?? null, true);
      this.isMounted = true;
      this.address.listen(() => this.openAsAsked(false));
    }

    async openAsAsked(predicts) {
      const { values: asked, faults } = this.address.read(), isQuiz = predicts || asked.predict === 1, state = { ...this.initial };
      for (const name of Object.keys(state)) if (name in asked) state[name] = asked[name];
      // Nothing changes before all of it is there, and nothing if another address has come meanwhile.
      this.opening = asked;
      if (this.rest && (isQuiz || Object.keys(asked).some((name) => !["p", "M", "at"].includes(name)))) this.rest.open = true; // what it asks for is in there
      await Promise.all([MM.needOrders(state.schedule), state.vs && MM.needOrders(state.vs), isQuiz && MM.load(PREDICT)]);
      if (this.opening !== asked) return;
      this.clock.pause();
      this.stopFollowing();
      Object.assign(this.state, state);
      Object.assign(this.timeline.marks, { t: null, chosen: null });
      if (Boolean(this.quiz) !== isQuiz) this.predict(isQuiz);
      this.faults = faults;
      this.update(asked);
      if (this.quiz && ["t", "at", "follow"].some((name) => name in asked)) this.say(say("player.hidden"));
      else if (asked.follow !== undefined) this.followAsAsked(asked);
      if (this.status.textContent && this.isMounted) this.writeAddress(); // what was refused goes
    }

    followAsAsked({ follow, step = 0 }) {
      const isOther = follow.startsWith(OTHER), mb = Number(follow.replace(OTHER, "")), scene = isOther ? this.scenes[1] : this.scene;
      if (scene && mb < this.state.M) this.follow(mb, scene, step);
      else this.say(say("player.none", { what: `follow = ${follow}` }));
    }

    // One more sentence above the timeline.
    say(words) {
      this.status.textContent = `${this.status.textContent} ${words}`.trim();
      this.status.hidden = false;
    }

    // -- Address --

    values() {
      const words = { schedule: this.state.schedule, p: this.state.p, M: this.state.M };
      for (const [name, value] of Object.entries(this.state))
        if (!(name in words) && value !== MM.PlayerState.DEFAULTS[name] && !(name === "G" && value === this.state.p)) words[name] = value;
      if (this.quiz) return { ...words, predict: 1 }; // whoever opens it begins to predict at the beginning
      const { chosen, t } = this.timeline.marks;
      if (this.following) {
        words.follow = this.following.scene.prefix + this.following.mb;
        if (this.following.place) words.step = this.following.place;
      } else if (t !== null && !this.clock.running) words.t = round(t);
      if (chosen && !this.following) words.at = chosen;
      return words;
    }

    writeAddress() {
      if (this.isMounted) this.address.write(() => this.values());
    }

    // -- Elements --

    build() {
      this.controls = new MM.Controls(this.state, (key, value) => this.set(key, value), this);
      this.timeline = new MM.Timeline({
        label: say("player.name"), describe: (id) => this.explain.describe(id), choose: (id) => this.chosen(id), densityChanged: () => this.showLegend(),
        intercept: (key) => this.following?.key(key), keys: { " ": () => !this.quiz && this.clock.toggle(this.timeline.marks.t), Enter: () => this.inspector.body.focus() },
      });
      this.explain = new MM.Explanation({ scenes: () => this.scenes, choose: (id) => this.timeline.choose(id), follow: (mb, scene) => this.follow(mb, scene) });
      this.inspector = new MM.Inspector({ root: this.root, isInline: this.isSmall, close: () => this.dismissed(), chosenBox: () => this.chosenBox() });
      this.clock = new MM.Clock({ span: () => this.span, next: (t) => this.endings().find((end) => end > t + 1e-9) ?? this.span, tick: (t) => this.seek(t, true), changed: () => {} });
      MM.playFollows(this);
      this.transport = MM.transport({ clock: this.clock, seek: (t) => { this.stopFollowing(); this.seek(t); }, step: (direction) => this.stepBy(direction) });
      this.transport.now = () => this.timeline.marks.t;
      const running = this.clock.changed;
      this.clock.changed = (is) => { running(is); if (!is) this.writeAddress(); };
      this.figures = make("div", { class: "mmp-figurebox" });
      this.status = make("p", { class: "mmp-status", role: "status" });
      this.legend = make("ul", { class: "mmp-legend", "aria-label": say("legend.name") });
      const tools = this.buildTools();
      this.table = make("div", { class: "mmp-table", tabindex: "0", role: "region", "aria-label": say("table.name") });
      this.twin = make("details", { class: "mmp-twin", ontoggle: () => this.drawTable() }, make("summary", {}, say("table.same")), this.table);
      const bar = make("div", { class: "mmp-bar" }, this.transport.element, this.timeline.zooms);
      const parts = this.isSmall ? [this.controls.element, this.status, make("div", { class: "mmp-beside" }, make("div", {}, this.timeline.element, bar, this.legend), this.inspector.element), this.figures]
        : this.isFew ? this.partsOfFew(bar, tools)
        : [this.controls.element, this.controls.more, this.status, this.timeline.element, bar, this.legend, this.figures, tools, this.twin, this.timeline.help, this.inspector.element];
      this.printed = make("p", { class: "mmp-printed" }); // on paper there are no controls
      this.root.replaceChildren(make("div", { class: `mmp ${this.isSmall ? "mmp-small" : ""}` }, this.printed, ...parts));
    }

    // Two controls and the picture; all else once it is asked for.
    partsOfFew(...tools) {
      this.rest = make("details", { class: "mmp-rest" }, make("summary", {}, say("player.more")),
        this.controls.rest, this.controls.more, ...tools, this.twin, this.timeline.help);
      return [this.controls.element, this.status, this.timeline.element, this.legend, this.figures, this.rest, this.inspector.element];
    }

    buildTools() {
      this.critical = make("input", { type: "checkbox", onchange: () => this.set("critical", this.critical.checked ? 1 : 0) });
      this.quizButton = make("button", { type: "button", "aria-pressed": "false", onclick: () => this.togglePredict() }, say("player.predict"));
      this.benchButton = make("button", { type: "button", "aria-expanded": "false", onclick: () => this.toggleBench() }, say("player.edit"));
      const button = (name, act) => make("button", { type: "button", onclick: act }, say(name));
      const spoilers = [make("label", { class: "mmp-switch" }, this.critical, ` ${say("legend.critical")}`), button("player.svg", () => MM.saveSvg(this))];
      for (const element of spoilers) element.classList.add("mmp-spoiler"); // not while something is to be predicted
      return make("div", { class: "mmp-tools" }, button("player.follow", () => this.follow(0)), this.quizButton, this.benchButton, ...spoilers,
        MM.copyLink(() => this.address.link(this.values())), button("player.reset", () => this.reset()));
    }

    // -- State --

    set(key, value) {
      if (["schedule", "vs"].includes(key) && value && !MM.hasOrders(value)) return MM.needOrders(value).then(() => this.set(key, value));
      this.clock.pause();
      this.state[key] = value;
      this.faults = [];
      if (key === "p") this.state.balance = ""; // one factor per stage
      const { following } = this, isLook = key === "critical" || key === "messages";
      if (isLook && following) return this.follow(following.mb, following.scene, following.place);
      if (!isLook) {
        this.stopFollowing();
        Object.assign(this.timeline.marks, { t: null, chosen: null });
      }
      const before = performance.now();
      this.bench?.leave(key);
      this.update();
      this.root.dataset.redrawMs = (performance.now() - before).toFixed(1);
    }

    reset() {
      this.clock.pause();
      this.stopFollowing();
      this.faults = [];
      Object.assign(this.state, this.initial);
      Object.assign(this.timeline.marks, { t: null, chosen: null });
      if (this.quiz) this.predict(false);
      if (this.bench?.isOpen) this.toggleBench();
      this.timeline.zoom = 1;
      this.update();
    }

    costs(v) {
      const { p, f, b, c, bi, bw, pair } = this.state, factors = this.controls.factors();
      const share = (time) => Array.from({ length: p }, (_, rank) => Array(v).fill((time * factors[rank]) / v));
      return { times: { F: share(f), B: share(b), I: share(bi || b / 2), W: share(bw || b / 2) }, message: c, pair: pair === "max" ? Math.max : null };
    }

    sceneOf(plan, schedule, options = {}) {
      const v = plan.placement.stages[0].length;
      return new MM.Scene({ plan, costs: this.costs(v), buffered: this.state.link === "buffered", schedule, title: this.title(plan, schedule), ...options });
    }

    update(asked = {}) {
      const { state } = this;
      const moved = this.controls.settle(asked), schedule = MM.drawnSchedule(state);
      const plan = this.bench?.plan ?? MM.engine.planOf(MM.orders, { ...state, schedule });
      this.scene = this.sceneOf(plan, plan.name ? "mine" : schedule);
      this.scenes = [this.scene];
      const notes = [...(this.faults ?? []), moved, schedule === "no-pipelining" ? say("player.one") : ""];
      if (state.vs && !this.quiz) notes.push(this.addOther(schedule));
      this.ends = null;
      this.shades = MM.orders.shades[Math.max(...this.scenes.map(({ v }) => v))] ?? MM.orders.shades[1];
      this.controls.show(this.scene.plan);
      this.critical.checked = Boolean(state.critical);
      this.status.textContent = notes.filter(Boolean).join(" ");
      this.status.hidden = !this.status.textContent;
      this.quiz?.restart();
      this.printed.textContent = this.scenes.map(({ title }) => title).join(" — ");
      this.timeline.box.setAttribute("aria-label", `${say("player.name")}. ${this.scenes.map(({ title }) => title).join(". ")}`);
      this.timeline.set(this.view(), this.shades, false); // drawn below, with what is chosen
      MM.showFigures(this);
      this.showLegend();
      if (this.twin.open) this.drawTable();
      if (asked.t > Math.max(this.span, round(this.span))) this.say(say("player.none", { what: `t = ${asked.t}` }));
      else if (asked.t !== undefined && !this.quiz) this.timeline.marks.t = Math.min(asked.t, this.span);
      this.showTime();
      const cell = asked.at && this.timeline.cell(asked.at);
      if (asked.at && !cell) this.say(say("address.gone", { id: asked.at, last: this.scene.p - 1 }));
      if (cell && !this.quiz) this.timeline.choose(asked.at, true);
      else this.chosen(this.timeline.marks.chosen);
    }

    // The schedule to compare with, on the same axis. Returns words where there is none of these sizes.
    addOther(schedule) {
      const config = MM.alike(this.state.vs, this.state), { v, G } = this.state;
      if (config?.schedule === schedule && config.v === v && config.G === G && !this.state.overlap && !this.scene.plan.name) return say("player.vs.same");
      if (!config) return say("player.vs.none", { name: MM.orders.names[this.state.vs], p: this.state.p, M: this.state.M });
      this.scenes.push(this.sceneOf(MM.engine.planOf(MM.orders, config), config.schedule, { prefix: OTHER, trackOffset: this.scene.p }));
      return "";
    }

    get span() {
      return Math.max(...this.scenes.map(({ step }) => step.makespan));
    }

    title(plan, schedule) {
      const { p, M, v, G, overlap } = { ...this.state, ...plan.config };
      const parts = [plan.name ?? MM.orders.names[schedule], say("title.stages", { n: p })];
      if (v > 1) parts.push(say("title.chunks", { n: v }));
      parts.push(say("title.microbatches", { n: M }) + (G && ["interleaved", "combined"].includes(schedule) ? say("title.groups", { G }) : ""));
      if (overlap) parts.push(say("title.overlap"));
      return parts.join(", ");
    }

    view() {
      const { state, scenes } = this, lanes = { messages: state.messages || this.following };
      return {
        tracks: scenes.flatMap((scene) => scene.tracks({ lanes, cap: state.cap * scene.v, notes: !this.quiz, section: scenes.length > 1 ? `${scene.title}: ${number(scene.step.makespan)}` : null })),
        span: this.span, words: (t) => round(t),
      };
    }

    showLegend() {
      MM.legend(this.legend, MM.legendOf(this));
    }

    // -- Time --

    endings() {
      return (this.ends ??= [...new Set(this.scenes.flatMap(({ step }) => step.work.flat().map((a) => step.endOf(a))))].sort((a, b) => a - b));
    }

    seek(t, isPlaying = false) {
      this.timeline.mark({ t: t >= this.span ? null : t });
      this.showTime();
      if (!isPlaying) this.writeAddress();
    }

    stepBy(direction) {
      if (this.following) return this.following.move(direction);
      if (direction === Infinity) return this.seek(this.span);
      if (direction === -Infinity) return this.seek(0);
      const { marks } = this.timeline, { step } = this.scene;
      const order = (this.scene.order ??= step.work.flat().sort((a, b) => step.endOf(a) - step.endOf(b) || a.rank - b.rank));
      const t = marks.t ?? (direction > 0 ? 0 : this.span);
      const chosen = order.findIndex((a) => a.id === marks.chosen), isThere = chosen >= 0 && step.endOf(order[chosen]) === t;
      const next = isThere ? chosen + direction : direction > 0 ? order.findIndex((a) => step.endOf(a) > t + 1e-9) : order.findLastIndex((a) => step.endOf(a) < t - 1e-9);
      const action = order[next];
      if (!action) return this.seek(direction > 0 ? this.span : 0);
      marks.t = step.endOf(action);
      this.showTime();
      this.timeline.choose(action.id);
    }

    showTime() {
      const { t } = this.timeline.marks;
      this.transport.show(t, say("time.of", { time: number(t ?? this.span), span: number(this.span) }));
    }

    // -- One action, one gap --

    chosen(id) {
      this.stopFollowing();
      const cell = id && this.timeline.cell(id), found = !cell ? null : this.quiz ? this.explain.shortDetails(id) : this.explain.details(id);
      this.timeline.mark({ chosen: found ? id : null, related: found?.related, lines: found?.lines, paths: found?.paths ?? this.criticalPaths() });
      if (found) this.inspector.show(...found.content);
      else if (this.isSmall) this.inspector.show(make("p", { class: "mmp-empty" }, say("player.choose")));
      else this.inspector.hide();
      this.writeAddress();
    }

    criticalPaths() {
      return this.state.critical && !this.quiz ? this.scenes.map((scene) => scene.criticalPath()) : null;
    }

    dismissed() {
      if (this.following) this.following.end();
      else if (this.timeline.marks.chosen) this.timeline.choose(null);
    }

    chosenBox() {
      const { chosen } = this.timeline.marks;
      return chosen ? this.timeline.boxOf(chosen) : null;
    }

    // -- One microbatch --

    follow(mb, scene = this.scene, place = 0) {
      if (this.quiz) {
        this.predict(false);
        scene = this.scene;
      }
      this.clock.pause();
      this.stopFollowing();
      Object.assign(this.timeline.marks, { t: null, chosen: null });
      this.following = new MM.Follow({ scene, numbers: this.state.M, narrate: (step) => this.explain.narrate(scene, step),
        show: (...shown) => this.showFollowed(scene, ...shown), ended: () => { this.stopFollowing(); this.chosen(null); } });
      this.controls.show(this.scene.plan);
      this.critical.checked = Boolean(this.state.critical);
      this.timeline.set(this.view(), this.shades, false); // with a lane of messages
      this.showLegend();
      this.following.begin(mb, place);
    }

    showFollowed(scene, step, content, words) {
      const faded = (bar) => this.following.isFaded(bar);
      this.timeline.mark({ chosen: step.id, related: null, paths: this.criticalPaths(), faded, lines: step.message ? this.explain.lineOf(scene, step.message) : [] });
      this.timeline.reveal(step.s, step.e);
      this.transport.show(step.s, say("time.of", { time: number(step.s), span: number(this.span) }));
      this.following.fill(this.inspector, content, this.isMounted ? "on" : null);
      this.timeline.live.textContent = words;
      this.writeAddress();
    }

    stopFollowing() {
      if (!this.following) return;
      this.following.stop();
      this.following = null;
      Object.assign(this.timeline.marks, { faded: null, chosen: null, lines: [], paths: null });
      this.timeline.set(this.view(), this.shades, false);
      this.showLegend();
      this.showTime();
    }

    // -- Table, file --

    drawTable() {
      if (this.twin.open) this.table.replaceChildren(...this.explain.tables());
    }

    // -- The reader's own --

    // Loaded on the first click: a few kilobytes; Python itself only when it is asked to run.
    async toggleBench() {
      await Promise.all(["workbench_data.js", "workbench.js"].map((name) => MM.load(`javascripts/${name}`)));
      MM.workbench ||= await MM.engine.unpack(MM.packed.workbench);
      this.bench ||= new MM.Workbench(this);
      const isOpen = !this.bench.isOpen;
      this.benchButton.setAttribute("aria-expanded", String(isOpen));
      if (isOpen) this.bench.open(this.status);
      else this.bench.close();
    }

    // -- Predicting --

    async togglePredict() {
      await MM.load(PREDICT);
      this.predict(!this.quiz);
    }

    predict(isOn) {
      this.clock.pause();
      this.stopFollowing();
      this.quizButton.setAttribute("aria-pressed", String(isOn));
      this.root.firstChild.classList.toggle("mmp-quizzing", isOn);
      if (isOn) {
        this.quiz = new MM.Quiz(this);
        this.timeline.element.after(this.quiz.element);
      } else {
        this.quiz.element.remove();
        this.quiz = null;
        Object.assign(this.timeline.marks, { hideFrom: null, ask: null, t: null });
      }
      this.timeline.marks.chosen = null;
      this.update();
    }
  }
})();
