package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// Clients of HTTP/2: many requests at a time on few connections, as browsers, gateways and clients of gRPC have them, and one at
// a time on many.
const (
	h2Conns   = 8
	h2Streams = 16
)

func h2Steps(w *webRig) []step {
	var out []step
	add := func(protocol, name string, conns, streams int) {
		out = append(out, step{name, protocol, w.multiplexed(conns, streams), expected{peer: everyPeer, least: 0.9, cpu: 1 / 0.9, p99: 1.5}})
	}
	for _, protocol := range []string{"h2", "h2c"} {
		add(protocol, fmt.Sprintf("requests, %d connections of %d streams", h2Conns, h2Streams), h2Conns, h2Streams)
		add(protocol, fmt.Sprintf("requests, %d connections of one stream", requestClients), requestClients, 1)
	}
	add("grpc", fmt.Sprintf("unary calls, %d connections of %d streams", h2Conns, h2Streams), h2Conns, h2Streams)
	return out
}

func (b *bench) runLBH2(ctx context.Context) (figures []figure, err error) {
	err = b.inWeb(ctx, 0, true, func(w *webRig) error { return w.run(ctx, h2Steps(w), "", &figures) })
	return figures, err
}

// h2loadProgram is nghttp2's client, in the folder of the peers.
const h2loadProgram = "nghttp2/usr/bin/h2load"

// multiplexed has h2load send requests on connections, each with so many at a time. For gRPC they are unary calls of messageSize bytes.
func (w *webRig) multiplexed(conns, streams int) func(context.Context, webLoad, time.Duration) (rate, float64, error) {
	return func(ctx context.Context, l webLoad, d time.Duration) (rate, float64, error) {
		dir, err := os.MkdirTemp(w.dir, "h2load-")
		if err != nil {
			return rate{}, 0, err
		}
		defer os.RemoveAll(dir)
		latencies := filepath.Join(dir, "latencies")
		d = max(d, 300*time.Millisecond)
		args := []string{
			"-c", strconv.Itoa(conns), "-m", strconv.Itoa(streams), "-D", fmt.Sprintf("%dms", d.Milliseconds()), "--log-file", latencies,
		}
		if l.calls {
			message := filepath.Join(dir, "message")
			if err := os.WriteFile(message, callMessage, 0o600); err != nil {
				return rate{}, 0, err
			}
			args = append(args, "-d", message, "-H", "content-type: application/grpc", "-H", "te: trailers")
		}
		scheme := "http"
		if l.tls != nil {
			scheme = "https"
		}
		args = append(args, scheme+"://"+l.to.String()+callPath)
		p, err := spawnDebian(l.from, filepath.Join(w.bench.peers, "nghttp2"), dir, "h2load", w.bench.peer(h2loadProgram), args...)
		if err != nil {
			return rate{}, 0, err
		}
		select {
		case <-p.ended:
		case <-time.After(d + loadTimeout):
			return rate{}, 0, errors.Join(errors.New("h2load does not end"), p.stop())
		case <-ctx.Done():
			return rate{}, 0, errors.Join(ctx.Err(), p.stop())
		}
		r, err := h2loadResult(p.log, latencies)
		return r, 0, errors.Join(p.err, err)
	}
}

var (
	h2loadRate   = regexp.MustCompile(`finished in [^,]*, ([0-9.]+) req/s`)
	h2loadDone   = regexp.MustCompile(`(\d+) done, (\d+) succeeded, 0 failed, 0 errored, 0 timeout`)
	h2loadStatus = regexp.MustCompile(`status codes: \d+ 2xx, 0 3xx, 0 4xx, 0 5xx`)
)

// h2loadResult reads what h2load has printed and logged. Every request must have succeeded.
func h2loadResult(printed, logged string) (rate, error) {
	text, err := os.ReadFile(printed)
	if err != nil {
		return rate{}, err
	}
	all, done := h2loadRate.FindSubmatch(text), h2loadDone.FindSubmatch(text)
	if all == nil || done == nil || !bytes.Equal(done[1], done[2]) || !h2loadStatus.Match(text) {
		return rate{}, fmt.Errorf("not every request has succeeded: %s", bytes.TrimSpace(text))
	}
	var r rate
	if r.perSecond, err = strconv.ParseFloat(string(all[1]), 64); err != nil {
		return rate{}, err
	}
	f, err := os.Open(logged)
	if err != nil {
		return rate{}, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text()) // when it began, its status, and its microseconds: h2load(1)
		if len(fields) < 3 {
			return rate{}, fmt.Errorf("h2load logs %q", lines.Text())
		}
		took, err := strconv.ParseFloat(fields[2], 64)
		if err != nil {
			return rate{}, err
		}
		r.latency = append(r.latency, took/1000)
	}
	return r, lines.Err()
}

// What a unary call carries: five bytes before a message, by the protocol of gRPC over HTTP/2.
var (
	callPath    = "/bench.Echo/Call"
	callMessage = append(binary.BigEndian.AppendUint32([]byte{0}, messageSize), bytes.Repeat([]byte{'m'}, messageSize)...)
)

// serveCalls answers unary calls of gRPC over HTTP/2 without TLS with the bytes of their messages.
func serveCalls(l net.Listener) error {
	return serveEach(l, func(c net.Conn) {
		s := callServer{r: bufio.NewReaderSize(c, 32<<10), w: bufio.NewWriterSize(c, 32<<10), calls: map[uint32]*bytes.Buffer{}}
		_ = s.serve() // its client sees the end
	})
}

// callServer answers on a connection. What it has answered is written once nothing more was read.
type callServer struct {
	r      *bufio.Reader
	w      *bufio.Writer
	framer *http2.Framer
	calls  map[uint32]*bytes.Buffer // messages that are not whole
}

func (s *callServer) serve() error {
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(s.r, preface); err != nil {
		return err
	}
	s.framer = http2.NewFramer(s.w, s.r)
	s.framer.SetReuseFrames()
	if err := s.framer.WriteSettings(http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: 1000}); err != nil {
		return err
	}
	for {
		if s.r.Buffered() == 0 {
			if err := s.w.Flush(); err != nil {
				return err
			}
		}
		f, err := s.framer.ReadFrame()
		if err != nil {
			return err
		}
		if err := s.take(f); err != nil {
			return err
		}
	}
}

func (s *callServer) take(f http2.Frame) error {
	switch f := f.(type) {
	case *http2.SettingsFrame:
		if !f.IsAck() {
			return s.framer.WriteSettingsAck()
		}
	case *http2.PingFrame:
		if !f.IsAck() {
			return s.framer.WritePing(true, f.Data)
		}
	case *http2.HeadersFrame:
		s.calls[f.StreamID] = &bytes.Buffer{}
		if f.StreamEnded() { // a request without a message, which rigs begin with
			return s.answer(f.StreamID)
		}
	case *http2.DataFrame:
		m := s.calls[f.StreamID]
		if m == nil {
			return fmt.Errorf("DATA of stream %d", f.StreamID)
		}
		m.Write(f.Data())
		if f.Length > 0 {
			if err := s.framer.WriteWindowUpdate(0, f.Length); err != nil {
				return err
			}
		}
		if f.StreamEnded() {
			return s.answer(f.StreamID)
		}
	case *http2.RSTStreamFrame:
		delete(s.calls, f.StreamID)
	}
	return nil
}

func (s *callServer) answer(stream uint32) error {
	m := s.calls[stream]
	delete(s.calls, stream)
	return errors.Join(
		s.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: callHead, EndHeaders: true}),
		s.framer.WriteData(stream, false, m.Bytes()),
		s.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: callEnd, EndHeaders: true, EndStream: true}))
}

// The blocks of every answer: encoders that have sent nothing use no dynamic table.
var (
	callHead = headBlock(hpack.HeaderField{Name: ":status", Value: "200"}, hpack.HeaderField{Name: "content-type", Value: "application/grpc"})
	callEnd  = headBlock(hpack.HeaderField{Name: "grpc-status", Value: "0"})
)

func headBlock(fields ...hpack.HeaderField) []byte {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	for _, f := range fields {
		f.Sensitive = true // it is not indexed
		_ = e.WriteField(f)
	}
	return b.Bytes()
}
