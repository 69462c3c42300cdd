// Package ui has the page of a cluster, for browsers: its files, the questions that the page asks beside the API's own lists and
// watches, and a server on loopback that serves the page for any Kubernetes API through a kubeconfig.
package ui

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"mime"
	"net/http"
	"path"
	"strings"
	"sync"
)

// Path is where the page is.
const Path = "/ui"

//go:embed static
var embedded embed.FS

// policy allows what the page needs: its own scripts and styles, and requests to its own server. Scripts and styles in the HTML,
// eval, frames and other hosts are refused (https://www.w3.org/TR/CSP3/).
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// file is one file as it is sent.
type file struct {
	kind         string // its media type
	etag         string
	plain, small []byte // small is compressed by gzip
}

// files returns the embedded files by their path below Path.
var files = sync.OnceValue(func() map[string]*file {
	out := map[string]*file{}
	err := fs.WalkDir(embedded, "static", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := embedded.ReadFile(name)
		if err != nil {
			return err
		}
		f := &file{kind: kindOf(name), plain: text}
		sum := sha256.Sum256(text)
		f.etag = `"` + hex.EncodeToString(sum[:12]) + `"`
		var b bytes.Buffer
		z, _ := gzip.NewWriterLevel(&b, gzip.BestCompression) // the level is a valid one
		_, _ = z.Write(text)                                  // a Buffer returns no error
		_ = z.Close()
		f.small = b.Bytes()
		out[strings.TrimPrefix(name, "static")] = f
		return nil
	})
	if err != nil {
		panic(fmt.Errorf("the files of the page: %w", err)) // they are part of the program
	}
	out["/"] = out["/index.html"]
	return out
})

func kindOf(name string) string {
	switch ext := path.Ext(name); ext {
	case ".js":
		return "text/javascript; charset=utf-8"
	case ".txt":
		return "text/plain; charset=utf-8"
	default:
		return mime.TypeByExtension(ext)
	}
}

// Files answers at Path with the files of the page, which are the same for everyone.
func Files() http.Handler { return http.HandlerFunc(serveFile) }

func serveFile(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	for k, v := range map[string]string{
		"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
		"X-Frame-Options": "DENY", "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin",
		"Cache-Control": "no-cache", "Vary": "Accept-Encoding",
	} {
		h.Set(k, v)
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		h.Set("Allow", "GET, HEAD")
		http.Error(w, "the page takes GET and HEAD", http.StatusMethodNotAllowed)
		return
	}
	name := strings.TrimPrefix(r.URL.Path, Path)
	if name == "" {
		http.Redirect(w, r, Path+"/", http.StatusPermanentRedirect)
		return
	}
	f := files()[name]
	if f == nil {
		http.Error(w, "the page has no such file", http.StatusNotFound)
		return
	}
	h.Set("ETag", f.etag)
	h.Set("Content-Type", f.kind)
	if r.Header.Get("If-None-Match") == f.etag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	text := f.plain
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		h.Set("Content-Encoding", "gzip")
		text = f.small
	}
	h.Set("Content-Length", fmt.Sprint(len(text)))
	if r.Method == http.MethodGet {
		_, _ = w.Write(text) // the client is gone
	}
}
