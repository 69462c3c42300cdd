package web

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// framedPod is a Pod that speaks HTTP/2 frame by frame: answer has the head of every request.
func (r *rig) framedPod(answer func(f *http2.Framer, h *http2.MetaHeadersFrame)) netip.AddrPort {
	r.Helper()
	return r.Pod(func(c net.Conn) { serveFrames(c, answer) })
}

func serveFrames(c io.ReadWriter, answer func(f *http2.Framer, h *http2.MetaHeadersFrame)) {
	if _, err := io.ReadFull(c, make([]byte, len(http2.ClientPreface))); err != nil {
		return
	}
	f := http2.NewFramer(c, c)
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	_ = f.WriteSettings()
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return
		}
		switch frame := frame.(type) {
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				_ = f.WriteSettingsAck()
			}
		case *http2.MetaHeadersFrame:
			answer(f, frame)
		}
	}
}

// headBlock is a header block of "name value" each.
func headBlock(fields ...string) []byte {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	for _, field := range fields {
		name, value, _ := strings.Cut(field, " ")
		_ = e.WriteField(hpack.HeaderField{Name: name, Value: value})
	}
	return b.Bytes()
}

// What a Pod of HTTP/2 sends behind the head of an answer that has no body never reaches a client: on a kept connection of HTTP/1.1
// it would be the next answer.
func TestNoBodyBehindAnswersWithout(t *testing.T) {
	const forged = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"
	r := newRig(t, map[string]string{lbProtocol: "http", lbBackend: "h2c"})
	r.set(r.framedPod(func(f *http2.Framer, h *http2.MetaHeadersFrame) {
		status, last := strings.TrimPrefix(h.PseudoValue("path"), "/"), "x y"
		if strings.HasSuffix(status, "t") { // with the news of trailers
			last = "trailer x"
		}
		_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: h.StreamID, EndHeaders: true,
			BlockFragment: headBlock(":status "+status[:3], last)})
		_ = f.WriteData(h.StreamID, true, []byte(forged))
	}))
	for _, version := range []string{"1.0", "1.1"} {
		for _, request := range []string{"HEAD /200", "HEAD /200t", "GET /204", "GET /304", "GET /304t", "HEAD /404"} {
			c := r.Dial()
			in := bufio.NewReader(c)
			method, _, _ := strings.Cut(request, " ")
			for _, ask := range []string{request, "GET /418"} {
				_, err := io.WriteString(c, ask+" HTTP/"+version+"\r\nHost: web\r\nConnection: keep-alive\r\n\r\n")
				r.Must(err)
				answer, err := http.ReadResponse(in, &http.Request{Method: method})
				if err != nil {
					t.Fatalf("%s, %s: %v", request, ask, err)
				}
				text, _ := io.ReadAll(answer.Body)
				want := ""
				if method = "GET"; ask == "GET /418" {
					want = forged
				}
				if !strings.Contains(ask, answer.Status[:3]) || string(text) != want {
					t.Errorf("%s, %s: %s %q", request, ask, answer.Status, text)
				}
			}
		}
	}
}

// An answer that is whole reaches the client although its Pod then resets the stream: it does not want the rest of the request
// (RFC 9113, section 8.1). Servers of net/http say StreamClosed for what was on its way.
func TestResetBehindAWholeAnswer(t *testing.T) {
	for _, code := range []http2.ErrCode{http2.ErrCodeNo, http2.ErrCodeStreamClosed, http2.ErrCodeCancel} {
		seen := make(chan struct{})
		r := newRig(t, map[string]string{lbProtocol: "http", lbBackend: "h2c"})
		r.set(r.Pod(func(c net.Conn) {
			serveFrames(c, func(f *http2.Framer, h *http2.MetaHeadersFrame) {
				_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: h.StreamID, EndHeaders: true, BlockFragment: headBlock(":status 200")})
				<-seen
				var all bytes.Buffer // in one write, so that the reset is read with the answer
				f = http2.NewFramer(&all, nil)
				_ = f.WriteData(h.StreamID, false, []byte("whole"))
				_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: h.StreamID, EndHeaders: true, EndStream: true,
					BlockFragment: headBlock("grpc-status 0")})
				_ = f.WriteRSTStream(h.StreamID, code)
				_, _ = c.Write(all.Bytes())
			})
		}))
		body, rest := io.Pipe()
		answer, err := r.clientOf(2).Post("http://"+r.At.String()+"/", "application/grpc", body)
		close(seen)
		r.Must(err)
		text, err := io.ReadAll(answer.Body)
		if err != nil || string(text) != "whole" || answer.Trailer.Get("Grpc-Status") != "0" {
			t.Errorf("%v: %q, %v, trailers %v", code, text, err, answer.Trailer)
		}
		_ = rest.Close()
	}
}

// A connection of HTTP/2 whose Pod expects the PROXY protocol, as routes can lead to one, is of one client: that in its header.
func TestStreamsWithProxyProtocol(t *testing.T) {
	r := newRig(t, map[string]string{
		lbProtocol: "http", "fairlead.dev/lb-proxy-protocol": "v1", "fairlead.dev/lb-trusted-fronts": "127.0.0.0/8",
	})
	var ended atomic.Int32
	r.appProtocol = "kubernetes.io/h2c"
	pod := r.Pod(func(c net.Conn) {
		defer ended.Add(1)
		line := []byte{}
		for b := []byte{0}; b[0] != '\n'; line = append(line, b[0]) {
			if _, err := c.Read(b); err != nil {
				return
			}
		}
		serveFrames(c, func(f *http2.Framer, h *http2.MetaHeadersFrame) {
			_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: h.StreamID, EndHeaders: true, BlockFragment: headBlock(":status 200")})
			_ = f.WriteData(h.StreamID, true, line)
		})
	})
	r.routes("HTTP", map[string]netip.AddrPort{"a": pod, "b": pod})
	asked := int32(0)
	for _, client := range []string{"192.0.2.1 198.51.100.1 1000 80", "192.0.2.2 198.51.100.1 2000 80"} {
		c := r.Dial()
		in := bufio.NewReader(c)
		_, err := io.WriteString(c, "PROXY TCP4 "+client+"\r\n")
		r.Must(err)
		for range 2 {
			_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: web\r\n\r\n")
			r.Must(err)
			answer, err := http.ReadResponse(in, nil)
			r.Must(err)
			if got, _ := io.ReadAll(answer.Body); string(got) != "PROXY TCP4 "+client+"\r\n" {
				t.Errorf("%s: %q", client, got)
			}
			asked++
		}
	}
	for deadline := time.Now().Add(lbtest.Patience); ended.Load() < asked; <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d connections have ended", ended.Load(), asked)
		}
	}
}

// Requests that wait for one connection to a Pod share its failure.
func TestFailedAttemptIsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr, addr := &transport{kind: transportKind{backend: dialect.H2C}}, netip.MustParseAddrPort("192.0.2.1:80")
		a, m, own := tr.muxes.Begin(addr)
		if !own {
			t.Fatal("an attempt of another request")
		}
		errs := make(chan error, 3)
		for range cap(errs) {
			go func() {
				_, err := tr.stream(dialling{multiplexes: true}, addr)
				errs <- err
			}()
		}
		synctest.Wait()
		a.Result(errSilent)
		tr.muxes.Finish(addr, m)
		for range cap(errs) {
			if err := <-errs; !errors.Is(err, errSilent) {
				t.Error(err)
			}
		}
	})
}
