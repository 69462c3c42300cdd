package web

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
	return append(append(to, value...), crlf...)
}

// headWriter makes heads of HTTP/1.1, or header blocks of HTTP/2.
type headWriter struct {
	http2.Encoder      // Block is what was made
	second        bool // HTTP/2
}

func (w *headWriter) field(name, value []byte) {
	if w.second {
		http2.Field(&w.Encoder, name, value)
		return
	}
	w.Block = appendField(w.Block, name, value)
}

func (w *headWriter) text(name []byte, value string) {
	if w.second {
		http2.Field(&w.Encoder, name, value)
		return
	}
	w.Block = appendField(w.Block, name, value)
}

func (w *headWriter) number(name []byte, n int64) {
	var digits [20]byte
	w.field(name, strconv.AppendInt(digits[:0], n, 10))
}

// raw adds what only HTTP/1.1 has.
func (w *headWriter) raw(text string) {
	if !w.second {
		w.Block = append(w.Block, text...)
	}
}

// end ends the head.
func (w *headWriter) end() { w.raw("\r\n") }

// Names of fields that are written here.
var (
	upgradeName, setCookieName, dateName = []byte("Upgrade"), []byte("Set-Cookie"), []byte("Date")
	lengthName, typeName, hostName       = []byte("Content-Length"), []byte("Content-Type"), []byte("Host")
	forwardedForName, forwardedProtoName = []byte("X-Forwarded-For"), []byte("X-Forwarded-Proto")
	forwardedPortName, teName            = []byte("X-Forwarded-Port"), []byte("Te")
	socketKeyName                        = []byte("Sec-WebSocket-Key")
	trailersText, plainText              = "trailers", "text/plain; charset=utf-8"
)

// heading is what a Pod is told beside the client's own fields.
type heading struct {
	client, at netip.AddrPort
	secure     bool
	websocket  bool   // ask for it
	key        string // of a WebSocket whose client has none: RFC 8441
	once       bool   // the connection has no further request
	backTLS    bool   // the Pod is spoken to by TLS
}

// request adds the head of a request for a Pod. It is that of the client but for what is of a connection.
func (w *headWriter) request(r *http1.Request, h heading) {
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
	case h.websocket:
		w.raw("Connection: Upgrade\r\nUpgrade: websocket\r\n")
		if h.key != "" {
			w.text(socketKeyName, h.key)
		}
	case h.once:
		w.raw("Connection: close\r\n")
	}
	w.end()
}

// requestLine begins a request.
func (w *headWriter) requestLine(r *http1.Request, h heading) {
	var listener [64]byte
	host := r.Host
	if len(host) == 0 {
		host = h.at.AppendTo(listener[:0])
	}
	if !w.second {
		w.Block = append(append(append(w.Block, r.Method...), ' '), r.Target...)
		w.Block = append(w.Block, " HTTP/1.1\r\n"...)
		w.field(hostName, host)
		return
	}
	scheme := "http"
	if h.backTLS {
		scheme = "https"
	}
	w.Pseudo(":method", string(r.Method))
	w.Pseudo(":scheme", scheme)
	w.field([]byte(":authority"), host)
	w.field([]byte(":path"), r.Target)
}

// forwarded adds who has asked. The client's own chain goes on with its address at the end, as by AWS's load balancers.
func (w *headWriter) forwarded(r *http1.Request, h heading, chain bool) {
	var small [256]byte
	value := small[:0]
	for i := range r.Fields {
		if f := &r.Fields[i]; chain && f.Kind == http1.XForwardedFor {
			value = append(append(value, f.Value...), ", "...)
		}
	}
	w.field(forwardedForName, h.client.Addr().AppendTo(value))
	proto := "http"
	if h.secure {
		proto = "https"
	}
	w.text(forwardedProtoName, proto)
	w.number(forwardedPortName, int64(h.at.Port()))
}

// reply is how an answer goes on to a client.
type reply struct {
	minor   int // of the client
	chunked bool
	close   bool
	cookie  string
}

// answer adds the head of a Pod's answer for a client.
func (w *headWriter) answer(r *http1.Response, o reply) {
	w.status(o.minor, r.Status, r.Reason)
	for i := range r.Fields {
		f := &r.Fields[i]
		switch f.Kind {
		case http1.ContentLength, http1.TransferEncoding, http1.Connection, http1.Upgrade, http1.TE, http1.HopByHop, http1.Named:
		case http1.Trailer:
			if o.chunked || w.second {
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
	if o.cookie != "" {
		w.text(setCookieName, o.cookie)
	}
	if !r.Dated {
		w.text(dateName, now())
	}
	switch {
	case o.chunked:
		w.raw("Transfer-Encoding: chunked\r\n")
	case r.Length >= 0 && !r.Chunked && !http1.Bodyless(r.Status):
		w.number(lengthName, r.Length)
	}
	w.connection(o.minor, o.close)
}

// status begins an answer.
func (w *headWriter) status(minor, status int, reason []byte) {
	if w.second {
		w.Status(status)
		return
	}
	w.Block = append(w.Block, "HTTP/1."...)
	w.Block = append(w.Block, byte('0'+minor), ' ')
	w.Block = append(strconv.AppendInt(w.Block, int64(status), 10), ' ')
	w.Block = append(append(w.Block, reason...), crlf...)
}

// connection adds what becomes of the connection, and ends the head.
func (w *headWriter) connection(minor int, closes bool) {
	switch {
	case closes:
		w.raw("Connection: close\r\n")
	case minor == 0:
		w.raw("Connection: keep-alive\r\n")
	}
	w.end()
}

// interim adds an interim answer (1xx).
func (w *headWriter) interim(r *http1.Response) {
	w.status(1, r.Status, r.Reason)
	for i := range r.Fields {
		if f := &r.Fields[i]; f.Kind == http1.Other {
			w.field(f.Name, f.Value)
		}
	}
	w.end()
}

// own adds the head of an answer of the load balancer's own, whose body is ownText.
func (w *headWriter) own(minor int, r *proxied.Reply, closes bool) {
	w.status(minor, r.Status, []byte(http.StatusText(r.Status)))
	w.text(dateName, now())
	for _, f := range r.Fields {
		w.field(f.Name, f.Value)
	}
	w.text(typeName, plainText)
	w.number(lengthName, int64(len(ownText(r.Status))))
	w.connection(minor, closes)
}

// trailers adds the fields behind a body.
func (w *headWriter) trailers(fields []http1.Field) {
	for i := range fields {
		if f := &fields[i]; f.Kind == http1.Other {
			w.field(f.Name, f.Value)
		}
	}
	w.end()
}

// ownText is the body of an answer of the load balancer's own.
func ownText(status int) string { return strconv.Itoa(status) + " " + http.StatusText(status) + "\n" }

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

// requestLine is what the access log has of a request.
type requestLine struct {
	method, host, uri, proto, agent string
	grpc                            bool
}

func requestLineOf(r *http1.Request, second bool) requestLine {
	l := requestLine{string(r.Method), string(r.Host), string(r.Target), "HTTP/1." + strconv.Itoa(r.Minor), "", false}
	if second {
		l.proto = "HTTP/2.0"
	}
	for _, f := range r.Fields {
		switch {
		case f.Kind == http1.UserAgent && l.agent == "":
			l.agent = string(f.Value)
		case second && string(f.Name) == "content-type":
			l.grpc = bytes.HasPrefix(f.Value, []byte("application/grpc"))
		}
	}
	return l
}

// text returns it as a whole, with the port if the host has none.
func (l requestLine) text(scheme string, port uint16) string {
	host := l.host
	if i := strings.LastIndexByte(host, ':'); i < 0 || strings.HasSuffix(host, "]") {
		host += ":" + strconv.Itoa(int(port))
	}
	return l.method + " " + scheme + "://" + host + l.uri + " " + l.proto
}
