package authz

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/gateway/filter"
	"github.com/fairlead/fairlead/internal/lb/proxied/envoyauth"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/mark"
)

// call is a question by gRPC, of Envoy's protocol.
type call struct {
	method string // of the request
	size   int64  // of its body, -1 if it is not known
	got    *envoyauth.Answer
}

// callTime is how long the server has, as gRPC tells it. Who asks ends the call after the same time.
const callTime = "10S"

// begin makes the head of the question that of a call, and returns the message. body is as that of Message.
func (q *Question) begin(body []byte, c Circumstances) []byte {
	m := envoyauth.Request{
		ID: c.ID, Method: q.call.method, Host: q.host, Scheme: q.scheme, Target: q.uri, Protocol: "HTTP/1.1", Fields: map[string]string{},
		Began: c.Began, Size: q.call.size, Body: body, Client: c.Client, At: c.At, Principal: c.Subject, ServerName: c.ServerName,
	}
	if body != nil {
		m.Size = int64(len(body))
	}
	if c.Second {
		m.Protocol = "HTTP/2"
	}
	for i := range q.head.Fields {
		f := &q.head.Fields[i]
		if f.Kind == http1.Underscored && !c.Underscores {
			continue // no Pod gets it
		}
		name, between := strings.ToLower(string(f.Name)), ","
		if f.Kind == http1.Cookie {
			between = "; " // HTTP/2 may divide it
		}
		if have, is := m.Fields[name]; is {
			m.Fields[name] = have + between + string(f.Value)
		} else {
			m.Fields[name] = string(f.Value)
		}
	}
	if q.rule.AskAll { // as Envoy does
		m.Fields[":method"], m.Fields[":scheme"], m.Fields[":authority"], m.Fields[":path"] = m.Method, m.Scheme, m.Host, m.Target
	}
	h := &q.head
	h.Method, h.Target, h.Trailers = []byte(http.MethodPost), []byte(envoyauth.Method), true
	h.Fields = []http1.Field{
		{Name: []byte("Content-Type"), Value: []byte("application/grpc")}, {Name: []byte("Grpc-Timeout"), Value: []byte(callTime)},
	}
	return m.Message()
}

var errTooLong = errors.New("the answer is too long")

// judgeCall is Judge for a call.
func (q *Question) judgeCall(a *Answer) (no *Refusal, err error) {
	status := slices.Concat(named(a.Trailers, "grpc-status"), named(a.Fields, "grpc-status"))
	switch {
	case a.Status != http.StatusOK:
		return nil, fmt.Errorf("the server answers with status %d", a.Status)
	case a.Body == nil:
		return nil, errTooLong
	case len(status) != 1 || string(status[0].Value) != "0":
		return nil, fmt.Errorf("the call ends with %.100q", values(slices.Concat(status, named(a.Trailers, "grpc-message"))))
	}
	if q.call.got, err = envoyauth.Read(a.Body); err != nil {
		return nil, fmt.Errorf("the answer cannot be used: %w", err)
	}
	got := q.call.got
	if got.Allowed {
		return nil, nil
	}
	no = &Refusal{Status: got.Status}
	if len(got.Body) > 0 {
		no.Body = got.Body
	}
	for _, f := range got.Fields {
		if about := strings.HasPrefix(strings.ToLower(f.Name), "content-"); !about || no.Body != nil {
			no.Fields = change(no.Fields, f)
		}
	}
	return no, nil
}

func values(fields []http1.Field) (out []string) {
	for _, f := range fields {
		out = append(out, string(f.Value))
	}
	return out
}

// change gives fields of an answer a further one.
func change(fields []http1.Field, f envoyauth.Field) []http1.Field {
	if !filter.ValidField(f.Name, f.Value) {
		return fields
	}
	same := func(h http1.Field) bool { return http1.EqualFold(h.Name, strings.ToLower(f.Name)) }
	has := slices.ContainsFunc(fields, same)
	if has && f.How == envoyauth.IfAbsent || !has && f.How == envoyauth.IfPresent {
		return fields
	}
	if f.How != envoyauth.Append {
		fields = slices.DeleteFunc(fields, same)
	}
	return append(fields, http1.Field{Name: []byte(f.Name), Value: []byte(f.Value)})
}

// passCall is Pass for a call. A field of the server takes the place of the client's in each spelling that a program may take for it,
// also if its value cannot be sent.
func (q *Question) passCall(r *http1.Request) {
	got := q.call.got
	for _, name := range got.Remove {
		if filter.ValidField(name, "x") {
			mark.SetField(r, []byte(name), nil)
		}
	}
	for _, f := range got.Fields {
		if !filter.ValidField(f.Name, "x") {
			continue
		}
		has := slices.ContainsFunc(r.Fields, func(h http1.Field) bool {
			return h.Kind != http1.Named && mark.Alike(h.Name, []byte(f.Name))
		})
		switch valid := filter.ValidField(f.Name, f.Value); {
		case has && f.How == envoyauth.IfAbsent, !has && f.How == envoyauth.IfPresent:
		case !valid:
			mark.SetField(r, []byte(f.Name), nil)
		case f.How == envoyauth.Append:
			r.Fields = append(r.Fields, http1.Field{Name: []byte(f.Name), Value: []byte(f.Value)})
		default:
			mark.SetField(r, []byte(f.Name), []byte(f.Value))
		}
	}
	if len(got.Query)+len(got.Drop) > 0 {
		r.Target = []byte(query(string(r.Target), got.Query, got.Drop))
	}
}

// query returns a target whose query has other parameters.
func query(target string, set []envoyauth.Parameter, drop []string) string {
	path, all, _ := strings.Cut(target, "?")
	var out []string
	for part := range strings.SplitSeq(all, "&") {
		key, _, _ := strings.Cut(part, "=")
		name, err := url.QueryUnescape(key)
		if err != nil {
			name = key
		}
		goes := slices.Contains(drop, name) || slices.ContainsFunc(set, func(p envoyauth.Parameter) bool { return p.Name == name })
		if part != "" && !goes {
			out = append(out, part)
		}
	}
	for _, p := range set {
		out = append(out, url.QueryEscape(p.Name)+"="+url.QueryEscape(p.Value))
	}
	if len(out) == 0 {
		return path
	}
	return path + "?" + strings.Join(out, "&")
}

// edit is Edit for a call.
func (c *call) edit() func(*http1.Response) {
	if len(c.got.Back) == 0 {
		return nil
	}
	return func(r *http1.Response) {
		for _, f := range c.got.Back {
			r.Fields = change(r.Fields, f)
		}
	}
}
