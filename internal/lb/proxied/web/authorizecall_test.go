package web

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	authv3 "github.com/envoyproxy/go-control-plane/envoy/service/auth/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// callDecider is an authorization server of Envoy's protocol, with the messages that Envoy's own library has for it. The field
// Authorization is what it answers.
type callDecider struct {
	authv3.UnimplementedAuthorizationServer
	mu   sync.Mutex
	last *authv3.AttributeContext
}

// header is a field as the protocol has it.
func header(name, value string, appends bool) *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{
		Header: &corev3.HeaderValue{Key: name, Value: value}, Append: wrapperspb.Bool(appends), //nolint:staticcheck // servers use it
	}
}

func (d *callDecider) Check(_ context.Context, q *authv3.CheckRequest) (*authv3.CheckResponse, error) {
	d.mu.Lock()
	d.last = q.GetAttributes()
	d.mu.Unlock()
	ok := &authv3.OkHttpResponse{
		Headers: []*corev3.HeaderValueOption{
			header("X-User", "alice", false), header("x-group", "staff", true), header("Host", "evil", false),
			header("Content-Length", "1000", false), header(":path", "/evil", false), header("X-Line", "a\r\nX-Evil: 1", false),
		},
		HeadersToRemove:      []string{"Authorization", "host", ":method"},
		ResponseHeadersToAdd: []*corev3.HeaderValueOption{header("X-Verdict", "fine", false)},
	}
	denied := func(code typev3.StatusCode, body string, fields ...*corev3.HeaderValueOption) *authv3.CheckResponse {
		return &authv3.CheckResponse{
			Status: &status.Status{Code: int32(codes.PermissionDenied)}, HttpResponse: &authv3.CheckResponse_DeniedResponse{
				DeniedResponse: &authv3.DeniedHttpResponse{Status: &typev3.HttpStatus{Code: code}, Headers: fields, Body: body},
			},
		}
	}
	switch q.GetAttributes().GetRequest().GetHttp().GetHeaders()["authorization"] {
	case "alice":
		return &authv3.CheckResponse{Status: &status.Status{}, HttpResponse: &authv3.CheckResponse_OkResponse{OkResponse: ok}}, nil
	case "query":
		ok.QueryParametersToSet = []*corev3.QueryParameter{{Key: "q", Value: "2 &"}}
		ok.QueryParametersToRemove = []string{"secret"}
		return &authv3.CheckResponse{Status: &status.Status{}, HttpResponse: &authv3.CheckResponse_OkResponse{OkResponse: ok}}, nil
	case "plain":
		return &authv3.CheckResponse{Status: &status.Status{}}, nil
	case "login":
		return denied(typev3.StatusCode_Found, "", header("Location", "/login", false), header("Set-Cookie", "a=1", true),
			header("Set-Cookie", "b=2", true), header("Connection", "x", false)), nil
	case "denied":
		return denied(typev3.StatusCode_Unauthorized, "who are you?", header("Content-Type", "text/x", false)), nil
	case "forgotten status":
		r := denied(typev3.StatusCode_Forbidden, "")
		r.Status = nil
		return r, nil
	case "no content":
		return denied(typev3.StatusCode_NoContent, ""), nil
	case "only a status":
		return &authv3.CheckResponse{Status: &status.Status{Code: 7}}, nil
	case "error":
		return &authv3.CheckResponse{HttpResponse: &authv3.CheckResponse_ErrorResponse{
			ErrorResponse: &authv3.DeniedHttpResponse{Body: "a secret of the server"},
		}}, nil
	case "nothing":
		return &authv3.CheckResponse{}, nil
	case "long":
		return denied(typev3.StatusCode_Forbidden, strings.Repeat("x", 100<<10)), nil
	}
	return nil, grpcstatus.Error(codes.Internal, "a secret of the server")
}

// attributes returns what the server got last.
func (d *callDecider) attributes() *authv3.AttributeContext {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.last
}

// authorizedByCalls is authorized with a server of Envoy's protocol.
func (r *rig) authorizedByCalls(d *callDecider, pod netip.AddrPort, more string) {
	r.Helper()
	l := r.Listener()
	s := grpc.NewServer()
	authv3.RegisterAuthorizationServer(s, d)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	r.Cleanup(func() {
		s.Stop()
		<-done
	})
	r.front(map[string]netip.AddrPort{"a": pod, "b": netip.MustParseAddrPort(l.Addr().String())}, `
metadata: {name: r, namespace: default}
spec:
  parentRefs: [{name: shop}]
  rules:
  - filters: [{type: ExternalAuth, externalAuth: {protocol: GRPC, backendRef: {name: b, port: 80}, `+more+`}}]
    backendRefs: [{name: a, port: 80}]`)
}

// A server of Envoy's protocol decides about each request, and changes it. Only a whole answer that permits lets a request pass.
func TestExternalAuthByCalls(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	auth := &callDecider{}
	r.authorizedByCalls(auth, r.Web(func(w http.ResponseWriter, q *http.Request) {
		w.Header().Set("X-Verdict", "mine")
		body, _ := io.ReadAll(q.Body)
		_, _ = fmt.Fprintf(w, "%s %s user=%q group=%q auth=%q line=%q evil=%q body=%d", q.Host, q.RequestURI, q.Header["X-User"],
			q.Header["X-Group"], q.Header["Authorization"], q.Header["X-Line"], q.Header["X-Evil"], len(body))
	}), "grpc: {}")
	const passed = `200 web.example.com /x?q=1 user=["alice"] group=["wheel" "staff"] auth=[] line=[] evil=[] body=1`
	for _, version := range []int{1, 2} {
		client := r.clientOf(version)
		for verdict, want := range map[string]string{
			"alice": passed, "query": strings.Replace(passed, "q=1", "q=2+%26", 1),
			"plain": `200 web.example.com /x?q=1 user=["root"] group=["wheel"] auth=["plain"] line=["mine"] evil=[] body=1`,
			"login": "302 302 Found", "denied": "401 who are you?", "forgotten status": "403 403 Forbidden", "only a status": "403 403 Forbidden",
			"no content": "403 403 Forbidden", "error": "503 503 Service Unavailable", "nothing": "503 503 Service Unavailable",
			"long": "503 503 Service Unavailable", "": "503 503 Service Unavailable",
		} {
			path := "/x?q=1"
			if verdict == "query" {
				path += "&secret=s"
			}
			answer, got := r.sends(client, "POST", path, strings.NewReader("b"), "Authorization: "+verdict, "X-User: root", "X_user: root",
				"X-Group: wheel", "X-Line: mine")
			if got = fmt.Sprint(answer.StatusCode, " ", got); got != want {
				t.Errorf("HTTP/%d, %q:\n%s, want\n%s", version, verdict, got, want)
			}
			h := answer.Header
			if verdict == "alice" && fmt.Sprint(h["X-Verdict"]) != "[fine]" || verdict == "denied" && h.Get("Content-Type") != "text/x" ||
				verdict == "login" && (h.Get("Location") != "/login" || len(h["Set-Cookie"]) != 2) {
				t.Errorf("HTTP/%d, %q: fields %v", version, verdict, h)
			}
		}
		_, _ = r.sends(client, "POST", "/a/..//%78?q=1", strings.NewReader("body"), "Cookie: a=b", "X-A: 1", "X-A: \xff", "X_Other: 1")
		got := auth.attributes()
		q := got.GetRequest().GetHttp()
		if q.GetMethod() != "POST" || q.GetPath() != "/x?q=1" || q.GetHost() != "web.example.com" || q.GetScheme() != "http" ||
			q.GetSize() != 4 || q.GetBody() != "" || q.GetProtocol() != map[int]string{1: "HTTP/1.1", 2: "HTTP/2"}[version] {
			t.Errorf("HTTP/%d: the server got %v", version, q)
		}
		if h := q.GetHeaders(); h["cookie"] != "a=b" || h["x-a"] != "1,\ufffd" || h[":path"] != "/x?q=1" || h["x_other"] != "" {
			t.Errorf("HTTP/%d: the server got the fields %v", version, h)
		}
		from, at := got.GetSource().GetAddress().GetSocketAddress(), got.GetDestination().GetAddress().GetSocketAddress()
		if from.GetAddress() != "127.0.0.1" || from.GetPortValue() == 0 || at.GetPortValue() != uint32(r.At.Port()) ||
			got.GetRequest().GetTime().AsTime().Year() < 2020 {
			t.Errorf("HTTP/%d: the server got %v", version, got)
		}
	}
	r.endpoints("b")
	if answer, _ := r.sends(r.clientOf(1), "GET", "/", nil, "Authorization: alice"); answer.StatusCode != 503 {
		t.Errorf("without an endpoint of the server: %d", answer.StatusCode)
	}
}

// The server gets the body, as text or as bytes, and of the fields the ones that it may have.
func TestExternalAuthByCallsWithBody(t *testing.T) {
	r := newRig(t, map[string]string{lbProtocol: "http"})
	auth := &callDecider{}
	r.authorizedByCalls(auth, r.Web(identified), "grpc: {allowedHeaders: [Authorization, X-A]}, forwardBody: {maxSize: 30000}")
	for _, body := range []string{"text", strings.Repeat("long ", 5000), "\xff\x00"} {
		for _, version := range []int{1, 2} {
			answer, got := r.sends(r.clientOf(version), "POST", "/", struct{ io.Reader }{strings.NewReader(body)}, "Authorization: alice",
				"X-A: 1", "X-B: 2")
			if want := fmt.Sprint("body=", len(body)); answer.StatusCode != 200 || !strings.HasSuffix(got, want) {
				t.Errorf("HTTP/%d, %.10q: %d %s, want %s", version, body, answer.StatusCode, got, want)
			}
			q := auth.attributes().GetRequest().GetHttp()
			if !bytes.Equal(append([]byte(q.GetBody()), q.GetRawBody()...), []byte(body)) || q.GetSize() != int64(len(body)) ||
				fmt.Sprint(q.GetHeaders()) != "map[authorization:alice x-a:1]" {
				t.Errorf("HTTP/%d, %.10q: the server got %.300v", version, body, q)
			}
		}
	}
	answer, _ := r.sends(r.clientOf(1), "POST", "/", bytes.NewReader(make([]byte, 30001)), "Authorization: alice")
	if answer.StatusCode != 413 {
		t.Errorf("a body that is too long: %d", answer.StatusCode)
	}
}
