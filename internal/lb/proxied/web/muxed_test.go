package web

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// h2cPod is a Pod that speaks HTTP/2 without TLS, and HTTP/1.1. settings are of HTTP/2.
func (r *rig) h2cPod(f http.HandlerFunc, settings ...*http.HTTP2Config) netip.AddrPort {
	r.Helper()
	s := httptest.NewUnstartedServer(f)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetHTTP1(true)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	for _, c := range settings {
		s.Config.HTTP2 = c
	}
	s.Start()
	r.Cleanup(s.Close)
	return netip.MustParseAddrPort(s.Listener.Addr().String())
}

// clientOf returns a client of HTTP/1.1 or HTTP/2 without TLS.
func (r *rig) clientOf(version int) *http.Client {
	t := &http.Transport{Protocols: new(http.Protocols), DisableCompression: true}
	t.Protocols.SetHTTP1(version == 1)
	t.Protocols.SetUnencryptedHTTP2(version == 2)
	r.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t, Timeout: lbtest.Patience}
}

// Every version of a client meets every version of a Pod: bodies with a length and without, trailers, answers without a body.
func TestVersionsMeet(t *testing.T) {
	long := bytes.Repeat([]byte("0123456789abcdef"), 64<<10) // many times a window
	for _, backend := range []string{"http", "h2c"} {
		r := newRig(t, map[string]string{lbProtocol: "http", lbBackend: backend})
		r.set(r.h2cPod(func(w http.ResponseWriter, q *http.Request) {
			_ = http.NewResponseController(w).EnableFullDuplex()
			w.Header().Set("X-Proto", q.Proto)
			h := q.Header
			w.Header().Set("X-Chain", h.Get("X-Forwarded-For")+" "+h.Get("X-Forwarded-Proto")+" "+q.Host+" "+h.Get("Cookie"))
			switch q.URL.Path {
			case "/none":
				w.WriteHeader(http.StatusNoContent)
				return
			case "/sized":
				w.Header().Set("Content-Length", "5")
				_, _ = io.WriteString(w, "sized")
				return
			}
			w.Header().Set("Trailer", "X-Sum")
			n, _ := io.Copy(w, q.Body)
			w.Header().Set("X-Sum", fmt.Sprint(n, " ", q.Trailer.Get("X-Sent")))
		}))
		for version := range 3 {
			if version == 0 {
				continue
			}
			what := fmt.Sprintf("HTTP/%d to %s", version, backend)
			client := r.clientOf(version)
			do := func(method, path string, body io.Reader) (*http.Response, string) {
				t.Helper()
				q, err := http.NewRequestWithContext(t.Context(), method, "http://"+r.At.String()+path, body)
				r.Must(err)
				q.Header["Cookie"] = []string{"a=b", "c=d"}
				q.Trailer = http.Header{"X-Sent": {"yes"}}
				if body == nil {
					q.Trailer = nil
				}
				answer, err := client.Do(q)
				if err != nil {
					t.Fatalf("%s: %s %s: %v", what, method, path, err)
				}
				text, err := io.ReadAll(answer.Body)
				if _ = answer.Body.Close(); err != nil {
					t.Fatalf("%s: %s %s: %v", what, method, path, err)
				}
				return answer, string(text)
			}
			answer, text := do("GET", "/sized", nil)
			proto := map[string]string{"http": "HTTP/1.1", "h2c": "HTTP/2.0"}[backend]
			if text != "sized" || answer.ContentLength != 5 || answer.ProtoMajor != version || answer.Header.Get("X-Proto") != proto {
				t.Errorf("%s: %q, %v", what, text, answer)
			}
			if got := answer.Header.Get("X-Chain"); !strings.HasPrefix(got, "127.0.0.1 http "+r.At.String()+" a=b") {
				t.Errorf("%s: %s", what, got)
			}
			if answer, text = do("GET", "/none", nil); answer.StatusCode != http.StatusNoContent || text != "" {
				t.Errorf("%s: %q, %v", what, text, answer)
			}
			if answer, text = do("HEAD", "/sized", nil); answer.ContentLength != 5 || text != "" {
				t.Errorf("%s: %q, %v", what, text, answer)
			}
			for name, body := range map[string]io.Reader{"short": strings.NewReader("abc"), "long": bytes.NewReader(long)} {
				answer, text = do("POST", "/", io.MultiReader(body)) // of unknown length
				if want := map[string]string{"short": "3 yes", "long": fmt.Sprint(len(long), " yes")}[name]; answer.Trailer.Get("X-Sum") != want ||
					name == "long" && text != string(long) {
					t.Errorf("%s: %s: trailers %v and %d bytes", what, name, answer.Trailer, len(text))
				}
			}
			var all sync.WaitGroup
			for range 50 { // many at a time, on one connection if they can
				all.Go(func() {
					answer, err := client.Post("http://"+r.At.String(), "", bytes.NewReader(long[:100<<10]))
					if err != nil {
						t.Errorf("%s: %v", what, err)
						return
					}
					defer answer.Body.Close()
					if n, err := io.Copy(io.Discard, answer.Body); n != 100<<10 || err != nil {
						t.Errorf("%s: %d bytes, %v", what, n, err)
					}
				})
			}
			all.Wait()
		}
	}
}

// A WebSocket of HTTP/2 (RFC 8441) reaches a Pod that speaks HTTP/1.1. What the Pod answers otherwise is no consent.
func TestWebSocketOverHTTP2(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	r.set(r.Web(func(w http.ResponseWriter, q *http.Request) {
		switch {
		case q.URL.Path == "/refused":
			w.WriteHeader(http.StatusForbidden)
			return
		case q.URL.Path == "/unknown" || q.Method != http.MethodGet || q.Header.Get("Upgrade") != "websocket",
			len(q.Header.Get("Sec-Websocket-Key")) != 24:
			return
		}
		c, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+
			"Sec-WebSocket-Accept: x\r\nSec-WebSocket-Protocol: chat\r\n\r\n")
		lbtest.Named("pod")(c)
	}))
	for path, want := range map[string]string{"/": "200 chat", "/refused": "403 ", "/unknown": "502 "} {
		c := r.Dial()
		_, err := io.WriteString(c, http2.ClientPreface)
		r.Must(err)
		f := http2.NewFramer(c, c)
		f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
		r.Must(f.WriteSettings())
		var b bytes.Buffer
		e := hpack.NewEncoder(&b)
		for _, h := range []string{
			":method CONNECT", ":protocol websocket", ":scheme http", ":path " + path, ":authority web", "sec-websocket-version 13",
		} {
			name, value, _ := strings.Cut(h, " ")
			r.Must(e.WriteField(hpack.HeaderField{Name: name, Value: value}))
		}
		r.Must(f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: b.Bytes(), EndHeaders: true}))
		got, enabled, echo := "", false, ""
		for deadline := time.Now().Add(lbtest.Patience); time.Now().Before(deadline); {
			frame, err := f.ReadFrame()
			if err != nil {
				break
			}
			switch frame := frame.(type) {
			case *http2.SettingsFrame:
				if v, ok := frame.Value(http2.SettingEnableConnectProtocol); ok {
					enabled = v == 1
				}
				continue
			case *http2.MetaHeadersFrame:
				got = frame.PseudoValue("status") + " "
				for _, h := range frame.RegularFields() {
					switch h.Name {
					case "sec-websocket-protocol":
						got += h.Value
					case "sec-websocket-accept":
						t.Errorf("the answer has %v", h)
					}
				}
				if strings.HasPrefix(got, "200") {
					r.Must(f.WriteData(1, false, []byte("hello\n")))
					continue
				}
			case *http2.DataFrame:
				if echo += string(frame.Data()); len(echo) < len("pod hello\n") && strings.HasPrefix(got, "200") {
					continue
				}
			default:
				continue
			}
			break
		}
		if got != want || !enabled || want == "200 chat" && echo != "pod hello\n" {
			t.Errorf("%s: %q, %q, announced: %t", path, got, echo, enabled)
		}
		_ = c.Close()
	}
}
