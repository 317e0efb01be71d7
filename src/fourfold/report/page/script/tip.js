/* The box of text beside the pointer. Names come from data: only ever as text, never as markup. */

const tip = {
  get element() {
    return document.getElementById("tip");
  },

  /**
   * @param x, y of the viewport.
   * @param content title, words (under it), colour (of its swatch), lines ([name, value, colour?]), note (a sentence).
   */
  show(x, y, { title, words = "", colour = null, lines = [], note = "" }) {
    const list = make("dl", "");
    for (const [name, value, shade] of lines) list.append(make("dt", name, shade), make("dd", value));
    const head = make("p", "", colour);
    head.append(make("b", title));
    this.element.replaceChildren(head, make("p", words), list, make("strong", note));
    this.element.hidden = false;
    // Beside the pointer, on the side where there is room.
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const left = x + 18 + width > innerWidth ? x - 18 - width : x + 18;
    const top = y + 18 + height > innerHeight ? y - 18 - height : y + 18;
    this.element.style.left = `${Math.max(left, 4)}px`;
    this.element.style.top = `${Math.max(top, 4)}px`;
  },

  hide() {
    this.element.hidden = true;
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
