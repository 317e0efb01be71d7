/* The box of text that follows the pointer, and a copy that stays. Names come from data: only ever as text. */

const APART = 14; // pixels between the tip and what it is about

const tip = {
  kept: null,

  get element() {
    return document.getElementById("tip");
  },

  /**
   * @param x, y of the viewport.
   * @param content title, words (beside it), colour (of its swatch), lines ([name, value, colour?]), note (a sentence).
   * @param chart the edges {top, bottom} of what it should not cover: it is shown below or above, if there is room.
   */
  show(x, y, { title, words = "", colour = null, lines = [], note = "" }, chart = null) {
    const list = make("dl", "");
    for (const [name, value, shade] of lines) list.append(make("dt", name, shade), make("dd", value));
    const head = make("p", "", colour);
    head.append(make("b", title), " ", make("span", words));
    this.element.replaceChildren(head, list, make("strong", note));
    this.element.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const clear = chart && chart.bottom + 2 + height < innerHeight;
    let left = clear ? x - width / 2 : x + APART + width > innerWidth ? x - APART - width : x + APART;
    const below = y + APART + height > innerHeight ? y - APART - height : y + APART;
    const top = Math.max(clear ? chart.bottom + 2 : below, 4);
    left = this.besideKept(Math.max(Math.min(left, innerWidth - width - 4), 4), top, width, height);
    this.element.style.left = `${left}px`;
    this.element.style.top = `${top}px`;
  },

  /** Not over what was kept, if there is room on one side of it: one is compared with the other. */
  besideKept(left, top, width, height) {
    if (!this.kept) return left;
    const kept = this.kept.copy.getBoundingClientRect();
    const apart = left > kept.right || left + width < kept.left || top > kept.bottom || top + height < kept.top;
    if (apart) return left;
    if (kept.right + 6 + width < innerWidth) return kept.right + 6;
    return kept.left - 6 - width > 0 ? kept.left - 6 - width : left;
  },

  hide() {
    this.element.hidden = true;
  },

  /** Leaves a copy where the tip is; `closed` is called when it goes. */
  keep(closed) {
    this.release();
    const copy = this.element.cloneNode(true);
    copy.id = "kept";
    const { left, top } = this.element.getBoundingClientRect();
    copy.style.left = `${left + scrollX}px`;
    copy.style.top = `${top + scrollY}px`;
    const button = make("button", "×");
    button.type = "button";
    button.setAttribute("aria-label", "close");
    button.addEventListener("click", () => this.release());
    copy.prepend(button);
    document.body.append(copy);
    this.kept = { copy, closed };
    this.hide();
  },

  release() {
    const { kept } = this;
    this.kept = null;
    kept?.copy.remove();
    kept?.closed();
  },
};

/** An element with a text, after a swatch if there is a colour. */
function make(tag, text, colour = null) {
  const made = document.createElement(tag);
  if (colour) {
    const swatch = document.createElement("i");
    swatch.className = "swatch";
    swatch.style.backgroundColor = colour;
    made.append(swatch);
  }
  made.append(text);
  return made;
}
