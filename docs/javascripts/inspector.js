"use strict";
// The one place where a choice is answered: docked at the right of a wide screen, a sheet at the bottom of a
// narrow one, inside the widget where that is small. In view whenever something is chosen, without scrolling.

(() => {
  const MM = (globalThis.MM ||= {});
  const make = MM.make;
  const WIDE = 1100, LEAST = 300, MOST = 380;
  let opened = null; // one at a time: a choice in one widget closes what another has said

  MM.Inspector = class Inspector {
    // `close()` is told when a reader closes it; `chosenBox()` says where on the screen the choice is.
    constructor({ root, isInline, close, chosenBox }) {
      Object.assign(this, { root, isInline, close, chosenBox });
      this.body = make("div", { class: "mmp-inspector-body", tabindex: "-1" });
      this.element = make("section", { class: `mmp-inspector ${isInline ? "mmp-inline-inspector" : ""}`, "aria-label": MM.say("inspector.name"), hidden: !isInline,
        onkeydown: (event) => this.key(event) },
        isInline ? null : make("button", { type: "button", class: "mmp-close", "aria-label": MM.say("inspector.close"), onclick: () => this.leave() }, "×"), this.body);
      addEventListener("resize", () => this.place());
    }

    show(...content) {
      const hadFocus = this.element.contains(document.activeElement);
      this.body.replaceChildren(...content.flat().filter(Boolean));
      this.element.scrollTop = 0;
      // Who has pressed a button in here goes on in here.
      if (hadFocus && !this.element.contains(document.activeElement)) this.body.focus({ preventScroll: true });
      if (opened !== this && !this.isInline) {
        opened?.dismiss();
        opened = this;
      }
      this.element.hidden = false;
      this.place();
      this.uncover();
    }

    hide() {
      if (this.isInline) return;
      this.element.hidden = true;
      if (opened === this) opened = null;
      this.root.style.removeProperty("--mmp-room");
      document.documentElement.style.removeProperty("--mmp-sheet");
    }

    dismiss() {
      this.hide();
      this.close();
    }

    get isOpen() {
      return !this.element.hidden;
    }

    get isDocked() {
      return innerWidth >= WIDE;
    }

    key(event) {
      if (event.key !== "Escape" || this.isInline) return;
      event.stopPropagation();
      this.leave();
    }

    leave() {
      this.dismiss();
      this.root.querySelector(".mmp-timeline")?.focus({ preventScroll: true });
    }

    // Beside the widget: what it would cover of it, the widget gives up.
    place() {
      if (this.isInline || !this.isOpen) return;
      this.root.style.removeProperty("--mmp-room");
      document.documentElement.style.setProperty("--mmp-sheet", this.isDocked ? "0px" : `${this.element.offsetHeight}px`);
      if (!this.isDocked) return;
      const box = this.root.getBoundingClientRect(), width = Math.min(MOST, Math.max(LEAST, innerWidth - box.right - 16));
      this.element.style.setProperty("--mmp-dock", `${width}px`);
      const room = box.right - (innerWidth - width - 12);
      if (room > 0) this.root.style.setProperty("--mmp-room", `${Math.ceil(room)}px`);
    }

    // The choice must neither be off the screen nor lie beneath the sheet that explains it.
    uncover() {
      const box = this.isInline ? null : this.chosenBox();
      if (!box) return;
      const bottom = this.isDocked ? innerHeight : this.element.getBoundingClientRect().top, header = document.querySelector(".md-header")?.offsetHeight ?? 0;
      if (box.bottom > bottom - 8) scrollBy({ top: box.bottom - bottom + 24, behavior: "instant" });
      else if (box.top < header + 8) scrollBy({ top: box.top - header - 16, behavior: "instant" });
    }
  };
})();
