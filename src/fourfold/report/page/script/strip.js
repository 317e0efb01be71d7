/* Boxes that are narrower than some pixels: each pixel has the mean colour of what is on it. */

/*
 * Boxes with their edges at whole pixels would be alternately wider and narrower, and gaps of half a pixel there or not:
 * equal boxes would make patterns that look like waiting.
 */
const THIN = 0.7; // pixels: a box is as wide at least, or a step's shortest boxes would not be seen

class Strip {
  constructor() {
    this.context = new OffscreenCanvas(1, 1).getContext("2d");
    this.sums = new Float32Array(0); // per pixel: red, green and blue times what is covered, and how much is covered
    this.empty = true;
  }

  clear(pixels) {
    if (this.sums.length === 4 * pixels) this.sums.fill(0);
    else this.sums = new Float32Array(4 * pixels);
    this.empty = true;
  }

  /** A box from `left` to `right`, in pixels, of a colour [red, green, blue]. */
  add(left, right, [red, green, blue]) {
    const { sums } = this;
    const end = Math.max(right, left + THIN);
    const last = Math.min(Math.ceil(end), sums.length / 4);
    for (let pixel = Math.max(Math.floor(left), 0); pixel < last; pixel++) {
      const part = Math.min(end, pixel + 1) - Math.max(left, pixel);
      sums[4 * pixel] += red * part;
      sums[4 * pixel + 1] += green * part;
      sums[4 * pixel + 2] += blue * part;
      sums[4 * pixel + 3] += part;
    }
    this.empty = false;
  }

  /** What boxes leave free lets the ground through. */
  paint(context, x, y, height, ratio) {
    if (this.empty) return;
    const { sums, context: line } = this;
    const pixels = sums.length / 4;
    if (line.canvas.width !== pixels) line.canvas.width = pixels;
    const image = line.createImageData(pixels, 1);
    for (let at = 0; at < sums.length; at += 4) {
      const covered = sums[at + 3];
      if (!covered) continue;
      for (let channel = 0; channel < 3; channel++) image.data[at + channel] = sums[at + channel] / covered;
      image.data[at + 3] = Math.min(covered, 1) * 255;
    }
    line.putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(line.canvas, x, y, pixels / ratio, height);
  }
}

/** Slanted lines over an idle stretch, which say that it is one on any screen. */
function hatch(context, left, right, y, height) {
  context.save();
  context.beginPath();
  context.rect(left, y, right - left, height);
  context.clip();
  context.beginPath();
  for (let x = left - height - ((left - height) % 8); x < right; x += 8) {
    context.moveTo(x, y + height);
    context.lineTo(x + height, y);
  }
  context.strokeStyle = theme.colour("hatch");
  context.lineWidth = 1;
  context.stroke();
  context.restore();
}
