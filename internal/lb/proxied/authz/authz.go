// Package authz asks about requests: what an authorization server gets of a request, and what its answer means. It knows no
// connection.
package authz

import (
	"bytes"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/mark"
)

// Question is about one request.
type Question struct {
	rule              *filter.Auth
	scheme, host, uri string
	head              http1.Request
	call              *call // nil unless the server is asked by gRPC
	// Instead, if not nil, is for a client that the server refuses with 401 or 403: another way to pass would do, too.
	Instead *Refusal
}

// Circumstances are what a question has beside the request's head.
type Circumstances struct {
	Client, At          netip.AddrPort
	Subject, ServerName string // of the client's certificate, and that it has asked for; "" without one
	ID                  string // by which the request is found again, "" for none
	Began               time.Time
	Second              bool // the client speaks HTTP/2
	Underscores         bool // Pods get fields whose names have a "_"
}

// Ask returns the question about a request of a client before any rule has changed it. uri is its path, in the form that rules are
// compared with, and its query. The question shares no bytes with the request, whose connection may go on to be read.
func Ask(rule *filter.Auth, r *http1.Request, client netip.Addr, secure bool, uri string) *Question {
	q := &Question{rule: rule, scheme: "http", host: string(r.Host), uri: uri}
	if secure {
		q.scheme = "https"
	}
	h := &q.head
	h.Minor = 1
	if rule.GRPC {
		q.call = &call{method: string(r.Method), size: r.Length}
	}
	h.Method, h.Host, h.Target = choose(rule.Method, r.Method), choose(rule.Host, r.Host), []byte(rule.Target)
	if rule.Target == "" {
		h.Target = []byte(rule.Prefix + uri)
	}
	for i := range r.Fields {
		if f := &r.Fields[i]; q.passes(f) {
			h.Fields = append(h.Fields, http1.Field{Name: bytes.Clone(f.Name), Value: bytes.Clone(f.Value), Kind: f.Kind})
		}
	}
	if n := rule.Nginx; n != nil {
		q.describe(n, string(r.Method), client)
	}
	return q
}

func choose(rule string, request []byte) []byte {
	if rule != "" {
		return []byte(rule)
	}
	return bytes.Clone(request)
}

// conditions are the fields that have a server answer with something else than it would otherwise: the answer is not for the client.
//
//nolint:gochecknoglobals // constant
var conditions = []string{"if-match", "if-none-match", "if-modified-since", "if-unmodified-since", "if-range", "range"}

// passes reports whether the server gets a field of the request. One whose name has a "_" it gets if a Pod does, by the configuration
// that the question is carried with.
func (q *Question) passes(f *http1.Field) bool {
	switch f.Kind {
	case http1.Other, http1.Cookie, http1.UserAgent, http1.Underscored:
	default:
		return false
	}
	name := strings.ToLower(string(f.Name))
	switch {
	case q.call != nil: // conditions are of the request, and not of the call
		return q.rule.AskAll || slices.Contains(q.rule.Ask, name)
	case q.rule.AskAll:
		return !slices.Contains(conditions, name)
	}
	return name == "authorization" || slices.Contains(q.rule.Ask, name)
}

// describe adds the fields by which ingress-nginx describes a request.
func (q *Question) describe(n *policy.NginxAuth, method string, client netip.Addr) {
	set := func(name, value string) { mark.SetField(&q.head, []byte(name), []byte(value)) }
	set("X-Original-URL", q.scheme+"://"+q.host+q.uri)
	set("X-Original-URI", q.uri)
	set("X-Original-Method", method)
	set("X-Scheme", q.scheme)
	set("X-Real-IP", client.Unmap().WithZone("").String())
	set("X-Auth-Request-Redirect", policy.Fill(n.Redirect, q.scheme, q.host, q.uri))
}

// MaxBody is how long the body of the request may be, in bytes, if the server gets it; 0 if it does not.
func (q *Question) MaxBody() int { return q.rule.Body }

// Message returns the head and the body for the server. body is that of the request, nil unless the server gets it.
func (q *Question) Message(body []byte, c Circumstances) (*http1.Request, []byte) {
	if q.call != nil {
		body = q.begin(body, c)
	}
	q.head.Length = int64(len(body))
	return &q.head, body
}

// Refusal is the answer for a client whose request may not pass. Without a Body it has the text of its status.
type Refusal struct {
	Status int
	Fields []http1.Field
	Body   []byte
}

// Judge returns the answer for the client, nil if the request may pass. The error is why the answer decides nothing.
func (q *Question) Judge(a *Answer) (*Refusal, error) {
	if len(a.Fields) > MaxFields {
		return nil, errFields
	}
	var no *Refusal
	var err error
	switch {
	case q.call != nil:
		no, err = q.judgeCall(a)
	case q.rule.Nginx != nil:
		no = q.judgeNginx(a)
	default:
		no = judge(a)
	}
	if no != nil && q.Instead != nil && (no.Status == http.StatusUnauthorized || no.Status == http.StatusForbidden) {
		no = q.Instead
	}
	return no, err
}

func judge(a *Answer) *Refusal {
	switch {
	case a.Status == http.StatusOK:
		return nil
	case a.Status < 300, a.Status == http.StatusNotModified: // what the client has is of the backend, not of the server
		return &Refusal{Status: http.StatusForbidden}
	case a.Status >= 500: // it has not decided, and its text is about itself
		return &Refusal{Status: http.StatusServiceUnavailable}
	}
	out := &Refusal{Status: a.Status, Body: a.Body}
	for _, f := range a.Fields {
		about := bytes.HasPrefix(bytes.ToLower(f.Name), []byte("content-"))
		if (f.Kind == http1.Other || f.Kind == http1.SetCookie) && (!about || a.Body != nil) {
			out.Fields = append(out.Fields, f)
		}
	}
	return out
}

func (q *Question) judgeNginx(a *Answer) *Refusal {
	n := q.rule.Nginx
	var out Refusal
	switch {
	case a.Status/100 == 2:
		return nil
	case a.Status == http.StatusUnauthorized && n.SignIn != "":
		out.Status = http.StatusFound
		out.Fields = append(out.Fields, http1.Field{Name: []byte("Location"), Value: []byte(n.Location(q.scheme, q.host, q.uri))})
	case a.Status == http.StatusUnauthorized:
		out.Status, out.Fields = a.Status, named(a.Fields, "www-authenticate")
	case a.Status == http.StatusForbidden:
		out.Status = a.Status
	default:
		return &Refusal{Status: http.StatusInternalServerError}
	}
	out.Fields = append(out.Fields, q.cookies(a, out.Status)...)
	return &out
}

// Failed returns the answer for the client if there is none of the server.
func (q *Question) Failed() *Refusal {
	if q.rule.Nginx != nil {
		return &Refusal{Status: http.StatusInternalServerError}
	}
	return &Refusal{Status: http.StatusServiceUnavailable}
}

func named(fields []http1.Field, name string) (out []http1.Field) {
	for _, f := range fields {
		if http1.EqualFold(f.Name, name) {
			out = append(out, f)
		}
	}
	return out
}

// cookies returns the cookies of the answer for a client that gets a status.
func (q *Question) cookies(a *Answer, status int) []http1.Field {
	if n := q.rule.Nginx; n == nil || !n.AlwaysCookie && status >= 400 {
		return nil
	}
	return named(a.Fields, "set-cookie")
}

// Pass gives a request that may pass the fields of the answer. What the rule names for them a client cannot send itself, in any
// spelling that a program may take for it.
func (q *Question) Pass(r *http1.Request, a *Answer) {
	if q.call != nil {
		q.passCall(r)
		return
	}
	names := slices.Clone(q.rule.Take)
	for i := range a.Fields {
		f := &a.Fields[i]
		name := strings.ToLower(string(f.Name))
		if q.rule.TakeAll && f.Kind == http1.Other && !slices.Contains(names, name) && !strings.HasPrefix(name, "content-") &&
			filter.ValidField(name, "x") {
			names = append(names, name)
		}
	}
	for _, name := range names {
		mark.SetField(r, []byte(name), nil)
	}
	for _, name := range names {
		for _, f := range named(a.Fields, name) {
			r.Fields = append(r.Fields, http1.Field{Name: f.Name, Value: f.Value})
		}
	}
}

// Withhold keeps trailers of a request from the Pod that it may not set itself, as Pass does with fields: some programs merge them.
// Without a question it does nothing.
func (q *Question) Withhold(trailers []http1.Field) {
	if q == nil {
		return
	}
	for _, name := range q.rule.Take {
		mark.Withhold(trailers, name)
	}
	for i := range trailers {
		if q.rule.TakeAll {
			trailers[i].Kind = http1.Named // is not passed on
		}
	}
}

// Edit returns what the answer of the server changes of a Pod's answer, nil if that is nothing: with cookies a session goes on.
func (q *Question) Edit(a *Answer) func(*http1.Response) {
	if q.call != nil {
		return q.call.edit()
	}
	if q.rule.Nginx == nil || len(named(a.Fields, "set-cookie")) == 0 {
		return nil
	}
	return func(r *http1.Response) { r.Fields = append(r.Fields, q.cookies(a, r.Status)...) }
}
