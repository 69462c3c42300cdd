// Package pages makes the requests for pages that take the place of answers: what the backend of the pages gets. It knows no connection.
package pages

import (
	"bytes"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/mark"
	"github.com/fairlead/fairlead/internal/svc"
)

// Cause is what a page is for: where a request would have been answered, and its path and query as the client has sent them.
type Cause struct {
	URI              string
	Ingress, Service svc.Name
	Port             uint16 // 0 if it is not known
}

// Tell gives a request the fields by which ingress-nginx tells a default backend what it answers for
// (https://kubernetes.github.io/ingress-nginx/user-guide/custom-errors/).
func (c *Cause) Tell(r *http1.Request, status int) {
	set := func(name, value string) { mark.SetField(r, []byte(name), []byte(value)) }
	set("X-Code", strconv.Itoa(status))
	set("X-Original-URI", c.URI)
	set("X-Namespace", c.Ingress.Namespace)
	set("X-Ingress-Name", c.Ingress.Name)
	set("X-Service-Name", c.Service.Name)
	port := ""
	if c.Port != 0 {
		port = strconv.Itoa(int(c.Port))
	}
	set("X-Service-Port", port)
	var format []byte // without the client's own one
	for i := range r.Fields {
		if f := &r.Fields[i]; f.Kind == http1.Other && bytes.EqualFold(f.Name, []byte("Accept")) {
			if len(format) > 0 {
				format = append(format, ", "...)
			}
			format = append(format, f.Value...)
		}
	}
	mark.SetField(r, []byte("X-Format"), format)
}

// Pages are how answers to a request are replaced.
type Pages struct {
	rule  *policy.Errors
	host  string
	cause Cause
	// logins are how clients of the answer that is dropped can authenticate.
	logins []http1.Field
}

// IsCall reports whether a request is a call of gRPC.
func IsCall(r *http1.Request) bool {
	const call = "application/grpc"
	return string(r.Method) == http.MethodPost && slices.ContainsFunc(r.Fields, func(f http1.Field) bool {
		if !bytes.EqualFold(f.Name, []byte("Content-Type")) || len(f.Value) < len(call) {
			return false
		}
		rest := f.Value[len(call):] // the type of gRPC-Web and others begins alike
		return strings.EqualFold(string(f.Value[:len(call)]), call) && (len(rest) == 0 || rest[0] == '+' || rest[0] == ';')
	})
}

// For returns the pages for a request before any rule has changed it. It is nil for a call of a backend that speaks gRPC: its clients
// expect no page. Any other client could choose to see what pages hide.
func For(rule *policy.Errors, r *http1.Request, c Cause, grpc bool) *Pages {
	if grpc && IsCall(r) {
		return nil
	}
	return &Pages{rule: rule, host: string(r.Host), cause: c}
}

// Has reports whether a page takes the place of an answer with a status. own is true for one of the load balancer.
func (p *Pages) Has(status int, own bool) bool { return p.rule.Has(status, own) }

// Drop notes what stays of an answer that a page takes the place of, which shares no bytes with it. That is how clients can authenticate,
// as in nginx: without it no browser asks for a password.
func (p *Pages) Drop(r *http1.Response) {
	for i := range r.Fields {
		if f := &r.Fields[i]; r.Status == http.StatusUnauthorized && bytes.EqualFold(f.Name, []byte("WWW-Authenticate")) {
			p.logins = append(p.logins, http1.Field{Name: bytes.Clone(f.Name), Value: bytes.Clone(f.Value), Kind: f.Kind})
		}
	}
}

// Logins are the fields of the dropped answer that belong to an answer with a status.
func (p *Pages) Logins(status int) []http1.Field {
	if status != http.StatusUnauthorized {
		return nil
	}
	return p.logins
}

// Edit returns what changes the head of a page: first, unless it is nil, and what stays of the dropped answer.
func (p *Pages) Edit(first func(*http1.Response)) func(*http1.Response) {
	if len(p.logins) == 0 {
		return first
	}
	return func(r *http1.Response) {
		if first != nil {
			first(r)
		}
		r.Fields = append(r.Fields, p.Logins(r.Status)...)
	}
}

// Request returns the request for the page in place of an answer with a status. r is the request as Pods get it, with which it shares no
// bytes. The page is asked for without the body, of which a Pod may have got a part, and so by GET or HEAD.
func (p *Pages) Request(r *http1.Request, status int) *http1.Request {
	page := r.Clone()
	if string(page.Method) != http.MethodHead {
		page.Method = []byte(http.MethodGet)
	}
	page.Target, page.Host = []byte("/"), []byte(p.host)
	if _, query, asked := strings.Cut(p.cause.URI, "?"); asked {
		page.Target = append([]byte("/?"), query...)
	}
	page.Fields = slices.DeleteFunc(page.Fields, ofContent)
	p.cause.Tell(page, status)
	return page
}

// ofContent reports whether a field is about the body of the request, or about the content that the client has already: with it the
// answer could be another one than the page.
func ofContent(f http1.Field) bool {
	switch f.Kind {
	case http1.ContentLength, http1.TransferEncoding, http1.Trailer, http1.Expect, http1.Upgrade:
		return true
	}
	name := strings.ToLower(string(f.Name))
	return name == "range" || slices.ContainsFunc([]string{"content-", "if-", "sec-websocket-"}, func(begin string) bool {
		return strings.HasPrefix(name, begin)
	})
}
