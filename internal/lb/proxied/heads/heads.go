// Package heads makes the heads of messages: of HTTP/1.1, and the header blocks of HTTP/2.
package heads

import (
	"bytes"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/http2"
)

func appendField[T string | []byte](to, name []byte, value T) []byte {
	to = append(append(to, name...), ": "...)
	return append(append(to, value...), "\r\n"...)
}

// Writer makes heads of HTTP/1.1, or header blocks of HTTP/2.
type Writer struct {
	http2.Encoder      // Block is what was made
	Second        bool // HTTP/2
}

func (w *Writer) field(name, value []byte) {
	if w.Second {
		http2.Field(&w.Encoder, name, value)
		return
	}
	w.Block = appendField(w.Block, name, value)
}

func (w *Writer) text(name []byte, value string) {
	if w.Second {
		http2.Field(&w.Encoder, name, value)
		return
	}
	w.Block = appendField(w.Block, name, value)
}

func (w *Writer) number(name []byte, n int64) {
	var digits [20]byte
	w.field(name, strconv.AppendInt(digits[:0], n, 10))
}

// raw adds what only HTTP/1.1 has.
func (w *Writer) raw(text string) {
	if !w.Second {
		w.Block = append(w.Block, text...)
	}
}

// end ends the head.
func (w *Writer) end() { w.raw("\r\n") }

// Names of fields that are written here.
var (
	upgradeName, setCookieName, dateName = []byte("Upgrade"), []byte("Set-Cookie"), []byte("Date")
	lengthName, typeName, hostName       = []byte("Content-Length"), []byte("Content-Type"), []byte("Host")
	forwardedForName, forwardedProtoName = []byte("X-Forwarded-For"), []byte("X-Forwarded-Proto")
	forwardedPortName, teName            = []byte("X-Forwarded-Port"), []byte("Te")
	socketKeyName                        = []byte("Sec-WebSocket-Key")
	trailersText, plainText              = "trailers", "text/plain; charset=utf-8"
)

// Heading is what a Pod is told beside the client's own fields.
type Heading struct {
	Client, At netip.AddrPort
	Secure     bool
	WebSocket  bool   // ask for it
	Key        string // of a WebSocket whose client has none: RFC 8441
	Once       bool   // the connection has no further request
	BackTLS    bool   // the Pod is spoken to by TLS
}

// Request adds the head of a request for a Pod. It is that of the client but for what is of a connection.
func (w *Writer) Request(r *http1.Request, h Heading) {
	w.requestLine(r, h)
	chain := 0
	for i := range r.Fields {
		f := &r.Fields[i]
		switch f.Kind {
		case http1.Host, http1.ContentLength, http1.TransferEncoding, http1.Connection, http1.Upgrade, http1.TE, http1.Forwarded,
			http1.HopByHop, http1.Named, http1.Underscored:
		case http1.Trailer:
			if r.Chunked && r.Announced {
				w.field(f.Name, f.Value)
			}
		case http1.XForwardedFor:
			chain++
		default:
			w.field(f.Name, f.Value)
		}
	}
	w.forwarded(r, h, chain > 0)
	if r.Trailers {
		w.text(teName, trailersText)
	}
	switch {
	case r.Chunked:
		w.raw("Transfer-Encoding: chunked\r\n")
	case r.Length > 0:
		w.number(lengthName, r.Length)
	default:
		switch string(r.Method) {
		case http.MethodPost, http.MethodPut, http.MethodPatch:
			w.number(lengthName, 0)
		}
	}
	switch {
	case h.WebSocket:
		w.raw("Connection: Upgrade\r\nUpgrade: websocket\r\n")
		if h.Key != "" {
			w.text(socketKeyName, h.Key)
		}
	case h.Once:
		w.raw("Connection: close\r\n")
	}
	w.end()
}

// requestLine begins a request.
func (w *Writer) requestLine(r *http1.Request, h Heading) {
	var listener [64]byte
	host := r.Host
	if len(host) == 0 {
		host = h.At.AppendTo(listener[:0])
	}
	if !w.Second {
		w.Block = append(append(append(w.Block, r.Method...), ' '), r.Target...)
		w.Block = append(w.Block, " HTTP/1.1\r\n"...)
		w.field(hostName, host)
		return
	}
	scheme := "http"
	if h.BackTLS {
		scheme = "https"
	}
	w.Pseudo(":method", string(r.Method))
	w.Pseudo(":scheme", scheme)
	w.field([]byte(":authority"), host)
	w.field([]byte(":path"), r.Target)
}

// forwarded adds who has asked. The client's own chain goes on with its address at the end, as by AWS's load balancers.
func (w *Writer) forwarded(r *http1.Request, h Heading, chain bool) {
	var small [256]byte
	value := small[:0]
	for i := range r.Fields {
		if f := &r.Fields[i]; chain && f.Kind == http1.XForwardedFor {
			value = append(append(value, f.Value...), ", "...)
		}
	}
	w.field(forwardedForName, h.Client.Addr().AppendTo(value))
	proto := "http"
	if h.Secure {
		proto = "https"
	}
	w.text(forwardedProtoName, proto)
	w.number(forwardedPortName, int64(h.At.Port()))
}

// Onward is how an answer goes on to a client.
type Onward struct {
	Minor   int // of the client
	Chunked bool
	Close   bool
	Cookie  string
}

// Answer adds the head of a Pod's answer for a client.
func (w *Writer) Answer(r *http1.Response, o Onward) {
	w.status(o.Minor, r.Status, r.Reason)
	for i := range r.Fields {
		f := &r.Fields[i]
		switch f.Kind {
		case http1.ContentLength, http1.TransferEncoding, http1.Connection, http1.Upgrade, http1.TE, http1.HopByHop, http1.Named:
		case http1.Trailer:
			if o.Chunked || w.Second {
				w.field(f.Name, f.Value)
			}
		default:
			w.field(f.Name, f.Value)
		}
	}
	if r.Status == http.StatusSwitchingProtocols {
		w.raw("Connection: Upgrade\r\n")
		w.field(upgradeName, r.Upgrade)
		w.end()
		return
	}
	if o.Cookie != "" {
		w.text(setCookieName, o.Cookie)
	}
	if !r.Dated {
		w.text(dateName, now())
	}
	switch {
	case o.Chunked:
		w.raw("Transfer-Encoding: chunked\r\n")
	case r.Length >= 0 && !r.Chunked && !http1.Bodyless(r.Status):
		w.number(lengthName, r.Length)
	}
	w.connection(o.Minor, o.Close)
}

// status begins an answer.
func (w *Writer) status(minor, status int, reason []byte) {
	if w.Second {
		w.Status(status)
		return
	}
	w.Block = append(w.Block, "HTTP/1."...)
	w.Block = append(w.Block, byte('0'+minor), ' ')
	w.Block = append(strconv.AppendInt(w.Block, int64(status), 10), ' ')
	w.Block = append(append(w.Block, reason...), "\r\n"...)
}

// connection adds what becomes of the connection, and ends the head.
func (w *Writer) connection(minor int, closes bool) {
	switch {
	case closes:
		w.raw("Connection: close\r\n")
	case minor == 0:
		w.raw("Connection: keep-alive\r\n")
	}
	w.end()
}

// Interim adds an interim answer (1xx).
func (w *Writer) Interim(r *http1.Response) {
	w.status(1, r.Status, r.Reason)
	for i := range r.Fields {
		if f := &r.Fields[i]; f.Kind == http1.Other {
			w.field(f.Name, f.Value)
		}
	}
	w.end()
}

// Own adds the head of an answer of the load balancer's own, whose body is BodyOf.
func (w *Writer) Own(minor int, r *proxied.Reply, closes bool) {
	w.status(minor, r.Status, []byte(http.StatusText(r.Status)))
	w.text(dateName, now())
	for _, f := range r.Fields {
		w.field(f.Name, f.Value)
	}
	if r.Body == nil {
		w.text(typeName, plainText)
	}
	w.number(lengthName, int64(len(BodyOf(r))))
	w.connection(minor, closes)
}

// Trailers adds the fields behind a body.
func (w *Writer) Trailers(fields []http1.Field) {
	for i := range fields {
		if f := &fields[i]; f.Kind == http1.Other {
			w.field(f.Name, f.Value)
		}
	}
	w.end()
}

// TextOf returns the body of an answer of the load balancer's own that has no other one.
func TextOf(status int) string { return strconv.Itoa(status) + " " + http.StatusText(status) + "\n" }

// BodyOf returns the body of an answer of the load balancer's own.
func BodyOf(r *proxied.Reply) []byte {
	if r.Body != nil {
		return r.Body
	}
	return []byte(TextOf(r.Status))
}

// date is the time of a second as the field Date has it.
type date struct {
	second int64
	text   string
}

var lastDate atomic.Pointer[date]

func now() string {
	t := time.Now()
	d := lastDate.Load()
	if d == nil || d.second != t.Unix() {
		d = &date{t.Unix(), t.UTC().Format(http.TimeFormat)}
		lastDate.Store(d)
	}
	return d.text
}

// Line is what the access log has of a request. The zero value is of none.
type Line struct {
	Method, Host, URI, Proto, Agent string
	GRPC                            bool
}

// LineOf returns the line of a request, which has come by HTTP/2 if second.
func LineOf(r *http1.Request, second bool) Line {
	l := Line{string(r.Method), string(r.Host), string(r.Target), "HTTP/1." + strconv.Itoa(r.Minor), "", false}
	if second {
		l.Proto = "HTTP/2.0"
	}
	for _, f := range r.Fields {
		switch {
		case f.Kind == http1.UserAgent && l.Agent == "":
			l.Agent = string(f.Value)
		case second && string(f.Name) == "content-type":
			l.GRPC = bytes.HasPrefix(f.Value, []byte("application/grpc"))
		}
	}
	return l
}

// Text returns it as a whole, with the port if the host has none.
func (l Line) Text(scheme string, port uint16) string {
	host := l.Host
	if i := strings.LastIndexByte(host, ':'); i < 0 || strings.HasSuffix(host, "]") {
		host += ":" + strconv.Itoa(int(port))
	}
	return l.Method + " " + scheme + "://" + host + l.URI + " " + l.Proto
}
