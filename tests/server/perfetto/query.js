// Runs Perfetto's own trace processor, as its web page does, outside of a browser.
//   node query.js DIRECTORY_OF_THE_PAGE REQUESTS REPLIES
// REQUESTS and REPLIES are messages of its protocol, each after its length in four bytes.
const fs = require("fs"), path = require("path"), vm = require("vm");
const [page, requests, replies] = process.argv.slice(2);
const read = (url) => new Uint8Array(fs.readFileSync(path.join(page, path.basename(String(url))))).buffer;
const sent = [];
const port = { onmessage: null, postMessage: (data) => sent.push(Buffer.from(data)) };

class Request { // what a worker of a browser fetches files with
  open(_method, url) { this.url = url; }
  send() { this.response = read(this.url); this.status = 200; }
}

const worker = {
  console: { log() {}, warn() {}, error: console.error },
  TextDecoder, TextEncoder, URL, setTimeout, clearTimeout, performance, crypto: globalThis.crypto,
  XMLHttpRequest: Request, WorkerGlobalScope: function () {}, location: { href: "http://page/engine_bundle.js" },
};
worker.self = worker;
vm.createContext(worker);
vm.runInContext(fs.readFileSync(path.join(page, "engine_bundle.js"), "utf8"), worker);
worker.onmessage({ data: port });
setImmediate(() => {
  const data = fs.readFileSync(requests), Bytes = vm.runInContext("Uint8Array", worker);
  for (let at = 0; at < data.length;) {
    const size = data.readUInt32LE(at);
    port.onmessage({ data: new Bytes(data.subarray(at + 4, at + 4 + size)) });
    at += 4 + size;
  }
  fs.writeFileSync(replies, Buffer.concat(sent));
});
