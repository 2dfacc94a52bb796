// Images of a prompt: chosen from files or pasted, shown as small pictures, sent as data URLs to models that read them.

import { button, h, replace, toast } from "./dom.js";
import { isImage } from "./conversation_files.js";

const TYPES = ["image/png", "image/jpeg"];

/** Build the pictures of a prompt. Only data URLs of PNG and JPEG files become one. */
export function imageRow(urls) {
  return urls.length > 0 && h("div", { class: "prompt-images" }, urls.map(picture));
}

function picture(url, i) {
  const node = h("img", { alt: `image ${i + 1} of the prompt` });
  if (isImage(url)) node.src = url;
  return node;
}

/** The pictures of the next prompt with a button that adds some; `list` is changed in place. */
export class ImageField {
  constructor(list) {
    this.#list = list;
    const files = h("input", {
      type: "file",
      accept: TYPES.join(),
      multiple: true,
      hidden: true,
      "aria-label": "Image files",
      onchange: async () => (await this.add(files.files), (files.value = "")),
    });
    this.adder = h("span", null, button("Image", () => files.click(), { class: "quiet", "aria-label": "Add image", title: "Add PNG or JPEG files" }), files);
    this.node = h("div", { class: "prompt-images" });
    this.#draw();
  }

  #list;

  /** Add files; anything but PNG and JPEG is refused with a message. */
  async add(files) {
    for (const file of files) {
      if (TYPES.includes(file.type)) this.#list.push(await dataUrl(file));
      else toast(`${file.name} is ${file.type || "of an unknown type"}; PNG and JPEG are accepted.`, "bad");
    }
    this.#draw();
  }

  /** Return the images and start the next prompt without any. */
  take() {
    const taken = this.#list.splice(0);
    this.#draw();
    return taken;
  }

  #draw() {
    this.node.hidden = !this.#list.length;
    const remove = (i) => (this.#list.splice(i, 1), this.#draw());
    replace(
      this.node,
      this.#list.map((url, i) =>
        h(
          "span",
          { class: "prompt-image" },
          picture(url, i),
          button("×", () => remove(i), { class: "small", "aria-label": `Remove image ${i + 1}` }),
        ),
      ),
    );
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
