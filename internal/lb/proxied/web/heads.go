package web

import (
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
)

func appendField[T string | []byte](to, name []byte, value T) []byte {
	to = append(append(to, name...), ": "...)
	return append(append(to, value...), crlf...)
}

// heading is what a Pod is told beside the client's own fields.
type heading struct {
	client, at netip.AddrPort
	secure     bool
	websocket  bool // ask for it
	once       bool // the connection has no further request
}

// appendRequest adds the head of a request for a Pod. It is that of the client but for what is of a connection, and
// what rewrite changes.
func appendRequest(to []byte, r *http1.Request, h heading) []byte {
	to = append(append(append(to, r.Method...), ' '), r.Target...)
	to = append(to, " HTTP/1.1\r\nHost: "...)
	if len(r.Host) > 0 {
		to = append(to, r.Host...)
	} else {
		to = h.at.AppendTo(to)
	}
	to = append(to, crlf...)
	chain := 0
	for i := range r.Fields {
		f := &r.Fields[i]
		switch f.Kind {
		case http1.Host, http1.ContentLength, http1.TransferEncoding, http1.Connection, http1.Upgrade, http1.TE, http1.Forwarded,
			http1.HopByHop, http1.Named:
		case http1.Trailer:
			if r.Chunked && r.Announced {
				to = appendField(to, f.Name, f.Value)
			}
		case http1.XForwardedFor:
			chain++
		default:
			to = appendField(to, f.Name, f.Value)
		}
	}
	to = append(to, "X-Forwarded-For: "...)
	for i := range r.Fields {
		if f := &r.Fields[i]; chain > 0 && f.Kind == http1.XForwardedFor {
			to = append(append(to, f.Value...), ", "...)
		}
	}
	to = h.client.Addr().AppendTo(to)
	if h.secure {
		to = append(to, "\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Port: "...)
	} else {
		to = append(to, "\r\nX-Forwarded-Proto: http\r\nX-Forwarded-Port: "...)
	}
	to = append(strconv.AppendUint(to, uint64(h.at.Port()), 10), crlf...)
	if r.Trailers {
		to = append(to, "Te: trailers\r\n"...)
	}
	switch {
	case r.Chunked:
		to = append(to, "Transfer-Encoding: chunked\r\n"...)
	case r.Length > 0:
		to = append(to, "Content-Length: "...)
		to = append(strconv.AppendInt(to, r.Length, 10), crlf...)
	default:
		switch string(r.Method) {
		case http.MethodPost, http.MethodPut, http.MethodPatch:
			to = append(to, "Content-Length: 0\r\n"...)
		}
	}
	switch {
	case h.websocket:
		to = append(to, "Connection: Upgrade\r\nUpgrade: websocket\r\n"...)
	case h.once:
		to = append(to, "Connection: close\r\n"...)
	}
	return append(to, crlf...)
}

// reply is how an answer goes on to a client.
type reply struct {
	minor   int // of the client
	chunked bool
	close   bool
	cookie  string
}

// appendAnswer adds the head of a Pod's answer for a client.
func appendAnswer(to []byte, r *http1.Response, o reply) []byte {
	to = appendStatus(to, o.minor, r.Status, r.Reason)
	for i := range r.Fields {
		f := &r.Fields[i]
		switch f.Kind {
		case http1.ContentLength, http1.TransferEncoding, http1.Connection, http1.Upgrade, http1.TE, http1.HopByHop, http1.Named:
		case http1.Trailer:
			if o.chunked {
				to = appendField(to, f.Name, f.Value)
			}
		default:
			to = appendField(to, f.Name, f.Value)
		}
	}
	if r.Status == http.StatusSwitchingProtocols {
		to = append(to, "Connection: Upgrade\r\n"...)
		return append(appendField(to, upgradeName, r.Upgrade), crlf...)
	}
	if o.cookie != "" {
		to = appendField(to, setCookieName, o.cookie)
	}
	if !r.Dated {
		to = appendField(to, dateName, now())
	}
	switch {
	case o.chunked:
		to = append(to, "Transfer-Encoding: chunked\r\n"...)
	case r.Length >= 0 && !r.Chunked && !http1.Bodyless(r.Status):
		to = append(to, "Content-Length: "...)
		to = append(strconv.AppendInt(to, r.Length, 10), crlf...)
	}
	return appendConnection(to, o.minor, o.close)
}

var upgradeName, setCookieName, dateName = []byte("Upgrade"), []byte("Set-Cookie"), []byte("Date")

func appendStatus(to []byte, minor, status int, reason []byte) []byte {
	to = append(to, "HTTP/1."...)
	to = append(to, byte('0'+minor), ' ')
	to = append(strconv.AppendInt(to, int64(status), 10), ' ')
	return append(append(to, reason...), crlf...)
}

// appendConnection adds what becomes of the connection, and ends the head.
func appendConnection(to []byte, minor int, closes bool) []byte {
	switch {
	case closes:
		to = append(to, "Connection: close\r\n"...)
	case minor == 0:
		to = append(to, "Connection: keep-alive\r\n"...)
	}
	return append(to, crlf...)
}

// appendInterim adds an interim answer (1xx).
func appendInterim(to []byte, r *http1.Response) []byte {
	to = appendStatus(to, 1, r.Status, r.Reason)
	for i := range r.Fields {
		if f := &r.Fields[i]; f.Kind == http1.Other {
			to = appendField(to, f.Name, f.Value)
		}
	}
	return append(to, crlf...)
}

// appendOwn adds an answer of the load balancer's own.
func appendOwn(to []byte, minor int, r *proxied.Reply, closes, head bool) []byte {
	reason := http.StatusText(r.Status)
	text := ownText(r.Status)
	to = appendStatus(to, minor, r.Status, []byte(reason))
	to = appendField(to, dateName, now())
	for _, f := range r.Fields {
		to = appendField(to, f.Name, f.Value)
	}
	to = append(to, "Content-Type: text/plain; charset=utf-8\r\nContent-Length: "...)
	to = append(strconv.AppendInt(to, int64(len(text)), 10), crlf...)
	to = appendConnection(to, minor, closes)
	if head {
		return to
	}
	return append(to, text...)
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

// cookies returns the fields Cookie of a request, and setCookies the fields Set-Cookie of an answer.
func cookies(r *http1.Request) []string { return valuesOf(r.Fields, http1.Cookie) }

func setCookies(r *http1.Response) []string { return valuesOf(r.Fields, http1.SetCookie) }

func valuesOf(fields []http1.Field, k http1.Kind) (out []string) {
	for _, f := range fields {
		if f.Kind == k {
			out = append(out, string(f.Value))
		}
	}
	return out
}

// requestLine is what the access log has of a request.
type requestLine struct {
	method, host, uri, proto, agent string
	grpc                            bool
}

func requestLineOf(r *http1.Request) requestLine {
	l := requestLine{string(r.Method), string(r.Host), string(r.Target), "HTTP/1." + strconv.Itoa(r.Minor), "", false}
	for _, f := range r.Fields {
		if f.Kind == http1.UserAgent {
			l.agent = string(f.Value)
			break
		}
	}
	return l
}

// lineOf returns what package net/http has read.
func lineOf(r *http.Request) requestLine {
	grpc := strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc")
	return requestLine{r.Method, r.Host, r.URL.RequestURI(), r.Proto, r.UserAgent(), grpc}
}

// text returns it as a whole, with the port if the host has none.
func (l requestLine) text(scheme string, port uint16) string {
	host := l.host
	if i := strings.LastIndexByte(host, ':'); i < 0 || strings.HasSuffix(host, "]") {
		host += ":" + strconv.Itoa(int(port))
	}
	return l.method + " " + scheme + "://" + host + l.uri + " " + l.proto
}
