package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	cryptorand "crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// webCommand is the argument with which this program is a backend of HTTP instead.
const webCommand = "web"

// What the backend of HTTP has: a small body, and one without an end for as long as a client reads.
const (
	webBody   = 128
	webStream = 1 << 40
)

var (
	webAnswer     = append(webHead(webBody), bytes.Repeat([]byte{'a'}, webBody)...)
	webStreamHead = webHead(webStream)
	headEnd       = []byte("\r\n\r\n")
)

func webHead(length int) []byte {
	return fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nDate: Sun, 22 Nov 2026 12:00:00 GMT\r\nContent-Type: text/plain\r\n"+
		"Content-Length: %d\r\n\r\n", length)
}

// Requests as a client of curl's kind sends them.
var (
	webGet    = []byte("GET /a HTTP/1.1\r\nHost: web.example\r\nUser-Agent: bench/1\r\nAccept: */*\r\n\r\n")
	webOnce   = []byte("GET /a HTTP/1.1\r\nHost: web.example\r\nUser-Agent: bench/1\r\nAccept: */*\r\nConnection: close\r\n\r\n")
	webDeluge = []byte("GET /stream HTTP/1.1\r\nHost: web.example\r\nUser-Agent: bench/1\r\nAccept: */*\r\n\r\n")
)

// serveWeb answers requests without bodies, with bytes that are made before, and calls of gRPC at another port.
func serveWeb(listen, calls string) error {
	l, err := net.Listen("tcp4", listen)
	if err != nil {
		return err
	}
	second, err := net.Listen("tcp4", calls)
	if err != nil {
		return err
	}
	go func() { _ = serveCalls(second) }()
	return serveEach(l, serveWebTo)
}

func serveWebTo(c net.Conn) {
	b := make([]byte, 8<<10)
	for n := 0; ; {
		m, err := c.Read(b[n:])
		if err != nil {
			return
		}
		n += m
		end := bytes.Index(b[:n], headEnd)
		if end < 0 {
			continue
		}
		request := b[:end]
		if bytes.HasPrefix(request, []byte("GET /stream")) {
			_, err = c.Write(webStreamHead)
			for chunk := make([]byte, chunkSize); err == nil; {
				_, err = c.Write(chunk)
			}
			return
		}
		if _, err := c.Write(webAnswer); err != nil || bytes.Contains(request, []byte("\r\nConnection: close")) {
			return
		}
		n = copy(b, b[end+len(headEnd):n])
	}
}

// fdConn is a socket with blocking system calls, for package tls.
type fdConn struct {
	net.Conn // nil: only the methods below are used
	fd       int
}

func (c fdConn) Read(p []byte) (n int, err error) {
	err = retryEINTR(func() (err error) { n, err = unix.Read(c.fd, p); return err })
	if err == nil && n == 0 && len(p) > 0 {
		err = io.EOF
	}
	return max(n, 0), err
}

func (c fdConn) Write(p []byte) (int, error) {
	if err := writeAll(c.fd, p); err != nil {
		return 0, err
	}
	return len(p), nil
}

func (c fdConn) Close() error                   { return unix.Close(c.fd) }
func (fdConn) SetDeadline(time.Time) error      { return nil } // the socket's own timeouts are set
func (fdConn) SetReadDeadline(time.Time) error  { return nil }
func (fdConn) SetWriteDeadline(time.Time) error { return nil }

// webLoad are clients of HTTP/1.1, like the clients of load: with a thread each, and requests that are made before.
type webLoad struct {
	load
	tls   *tls.Config // nil without TLS
	calls bool        // of gRPC
	// requests has what kept sends: one of them at random each time. If it is empty, webGet is sent.
	requests [][]byte
}

func (l webLoad) request() []byte {
	if len(l.requests) == 0 {
		return webGet
	}
	return l.requests[rand.IntN(len(l.requests))]
}

// open connects. With a cache, a session of TLS is resumed if there is one.
func (l webLoad) open(cache tls.ClientSessionCache) (c io.ReadWriteCloser, resumed bool, err error) {
	fd, err := l.connect()
	if err != nil {
		return nil, false, err
	}
	if l.tls == nil {
		return fdConn{fd: fd}, false, nil
	}
	config := l.tls
	if cache != nil {
		config = config.Clone()
		config.ClientSessionCache = cache
	}
	t := tls.Client(fdConn{fd: fd}, config)
	if err := t.Handshake(); err != nil {
		_ = unix.Close(fd)
		return nil, false, err
	}
	return t, t.ConnectionState().DidResume, nil
}

// get sends a request and reads the answer to it, whose body has webBody bytes.
func get(c io.ReadWriter, request, b []byte) error {
	if _, err := c.Write(request); err != nil {
		return err
	}
	for n := 0; ; {
		m, err := c.Read(b[n:])
		n += m
		if end := bytes.Index(b[:n], headEnd); end >= 0 && n >= end+len(headEnd)+webBody {
			if !bytes.HasPrefix(b, []byte("HTTP/1.1 200")) || n > end+len(headEnd)+webBody {
				return fmt.Errorf("answered %.200q", b[:n])
			}
			return nil
		}
		if err != nil {
			return fmt.Errorf("after %.200q: %w", b[:n], err)
		}
	}
}

// kept has n clients send requests, each on its own connection.
func (l webLoad) kept(ctx context.Context, n int, d time.Duration) (rate, error) {
	return l.every(ctx, n, d, func() (func() error, func(), error) {
		c, _, err := l.open(nil)
		if err != nil {
			return nil, nil, err
		}
		b := make([]byte, 4<<10)
		return func() error { return get(c, l.request(), b) }, func() { _ = c.Close() }, nil
	})
}

// opened has n clients open a connection for each request, which the other end closes. With resume, all of a
// client's but the first resume its session of TLS.
func (l webLoad) opened(ctx context.Context, n int, d time.Duration, resume bool) (rate, error) {
	var caches chan tls.ClientSessionCache
	if resume { // the first session is not measured
		caches = make(chan tls.ClientSessionCache, n)
		if err := l.clients(n, func(int) error {
			cache := tls.NewLRUClientSessionCache(4)
			caches <- cache
			c, _, err := l.open(cache)
			if err != nil {
				return err
			}
			defer c.Close()
			return get(c, webOnce, make([]byte, 4<<10)) // the ticket comes with it
		}); err != nil {
			return rate{}, err
		}
	}
	return l.every(ctx, n, d, func() (func() error, func(), error) {
		var cache tls.ClientSessionCache
		if resume {
			cache = <-caches
		}
		b := make([]byte, 4<<10)
		step := func() error {
			c, resumed, err := l.open(cache)
			if err != nil {
				return err
			}
			defer c.Close()
			if l.tls != nil && resumed != resume {
				return fmt.Errorf("a session of TLS is resumed: %t", resumed)
			}
			if err := get(c, webOnce, b); err != nil {
				return err
			}
			if n, err := c.Read(b); n > 0 || err != nil && !errors.Is(err, io.EOF) {
				return fmt.Errorf("after the answer: %.200q, %w", b[:n], err)
			}
			return nil
		}
		return step, func() {}, nil
	})
}

// deluge receives a body over n connections for d and returns bits a second.
func (l webLoad) deluge(ctx context.Context, n int, d time.Duration) (float64, error) {
	totals := make([]int64, n)
	start := time.Now()
	err := l.clients(n, func(i int) error {
		c, _, err := l.open(nil)
		if err != nil {
			return err
		}
		defer c.Close()
		if _, err := c.Write(webDeluge); err != nil {
			return err
		}
		plain, isPlain := c.(fdConn)
		b := make([]byte, 64<<10)
		for time.Since(start) < d && ctx.Err() == nil {
			var n int
			if isPlain {
				n, err = discard(plain.fd)
			} else {
				n, err = c.Read(b)
			}
			if totals[i] += int64(n); err != nil {
				return err
			}
		}
		return nil
	})
	took := time.Since(start).Seconds()
	sum := int64(0)
	for _, t := range totals {
		sum += t
	}
	return 8 * float64(sum) / took, errors.Join(err, ctx.Err())
}

// idle opens n connections, each of which has had one request, and returns what closes them.
func (l webLoad) idle(n int) (done func(), err error) {
	conns := make([]io.ReadWriteCloser, n)
	done = func() {
		for _, c := range conns {
			if c != nil {
				_ = c.Close()
			}
		}
	}
	const openers = 8
	err = l.clients(openers, func(i int) error {
		b := make([]byte, 4<<10)
		for j := i; j < n; j += openers {
			c, _, err := l.open(nil)
			if err != nil {
				return fmt.Errorf("connection %d: %w", j, err)
			}
			conns[j] = c
			if err := get(c, webGet, b); err != nil {
				return fmt.Errorf("connection %d: %w", j, err)
			}
		}
		return nil
	})
	return done, err
}

// webCertificate makes a certificate as files contain it, its key last.
func webCertificate() (cert, key []byte, err error) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), cryptorand.Reader)
	if err != nil {
		return nil, nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "web.example"}, DNSNames: []string{"web.example"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
	der, err := x509.CreateCertificate(cryptorand.Reader, template, template, k.Public(), k)
	if err != nil {
		return nil, nil, err
	}
	text, err := x509.MarshalECPrivateKey(k)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: text}), err
}

// webTLS is how clients speak TLS: with what all the servers have. The certificate is not verified: that is the
// same work for each.
func webTLS() *tls.Config {
	return &tls.Config{
		InsecureSkipVerify: true, ServerName: "web.example", MinVersion: tls.VersionTLS13, NextProtos: []string{"http/1.1"},
		CurvePreferences: []tls.CurveID{tls.X25519},
	}
}

// at is an address with a port.
func at(a netip.Addr, port int) netip.AddrPort {
	return netip.AddrPortFrom(a, uint16(port))
}

// webListener is a listener of each carrier.
type webListener struct {
	name  string
	port  int
	tls   bool
	http2 bool // its clients speak HTTP/2
	calls bool // of gRPC, which endpoints have by HTTP/2 without TLS
}

var webListeners = []webListener{
	{name: "tcp", port: 8081},
	{name: "http", port: 8080},
	{name: "https", port: 8443, tls: true},
	{name: "h2c", port: 8082, http2: true},
	{name: "h2", port: 8444, tls: true, http2: true},
	{name: "grpc", port: 8445, tls: true, http2: true, calls: true},
}

// protocol is what annotations of fairlead call it.
func (l webListener) protocol() string {
	switch {
	case l.tls:
		return "https"
	case l.http2:
		return "http"
	}
	return l.name
}

// target is the port of its endpoints.
func (l webListener) target() int {
	if l.calls {
		return callPort
	}
	return loadPort
}

// callPort is where endpoints have calls of gRPC.
const callPort = loadPort + 1

// listenerNamed returns a listener.
func listenerNamed(name string) webListener {
	return webListeners[slices.IndexFunc(webListeners, func(l webListener) bool { return l.name == name })]
}

func listenAt(port int) string { return ":" + strconv.Itoa(port) }
