package envoyauth

import (
	"encoding/binary"
	"fmt"
	"reflect"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	authv3 "github.com/envoyproxy/go-control-plane/envoy/service/auth/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// framed is a message as gRPC sends it.
func framed(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(b))), b...) //nolint:gosec // short
}

func option(name string, how corev3.HeaderValueOption_HeaderAppendAction, appends *wrapperspb.BoolValue) *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{
		Header: &corev3.HeaderValue{Key: name, Value: "v"}, AppendAction: how, Append: appends, //nolint:staticcheck // servers use it
	}
}

// What Envoy's own library writes is read as it was meant.
func TestRead(t *testing.T) {
	const add, absent = corev3.HeaderValueOption_APPEND_IF_EXISTS_OR_ADD, corev3.HeaderValueOption_ADD_IF_ABSENT
	const over, present = corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD, corev3.HeaderValueOption_OVERWRITE_IF_EXISTS
	details, err := structpb.NewStruct(map[string]any{"a": []any{1.5, "b", nil}})
	if err != nil {
		t.Fatal(err)
	}
	ok := &authv3.CheckResponse{
		Status: &status.Status{Message: "fine"}, DynamicMetadata: details,
		HttpResponse: &authv3.CheckResponse_OkResponse{OkResponse: &authv3.OkHttpResponse{
			Headers: []*corev3.HeaderValueOption{
				option("a", add, nil), option("b", add, wrapperspb.Bool(true)), option("c", absent, nil), option("d", over, nil),
				option("e", present, nil), {Header: &corev3.HeaderValue{Key: "f", RawValue: []byte("raw")}},
			},
			HeadersToRemove:         []string{"g"},
			ResponseHeadersToAdd:    []*corev3.HeaderValueOption{option("h", add, wrapperspb.Bool(false))},
			QueryParametersToSet:    []*corev3.QueryParameter{{Key: "i", Value: "j"}},
			QueryParametersToRemove: []string{"k"}, DynamicMetadata: details, //nolint:staticcheck // servers use it
		}},
	}
	got, err := Read(framed(t, ok))
	want := &Answer{
		Allowed: true, Fields: []Field{
			{"a", "v", Replace}, {"b", "v", Append}, {"c", "v", IfAbsent}, {"d", "v", Replace}, {"e", "v", IfPresent}, {"f", "raw", Replace},
		},
		Remove: []string{"g"}, Back: []Field{{"h", "v", Replace}}, Query: []Parameter{{"i", "j"}}, Drop: []string{"k"},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
	denial := &authv3.CheckResponse_DeniedResponse{DeniedResponse: &authv3.DeniedHttpResponse{
		Status: &typev3.HttpStatus{Code: 418}, Headers: []*corev3.HeaderValueOption{option("a", add, nil)}, Body: "no",
	}}
	for name, c := range map[string]struct {
		answer *authv3.CheckResponse
		want   string
	}{
		"permitted":             {&authv3.CheckResponse{Status: &status.Status{}}, "true 0"},
		"permitted only by ok":  {&authv3.CheckResponse{HttpResponse: ok.GetHttpResponse()}, "true 0"},
		"denied":                {&authv3.CheckResponse{Status: &status.Status{Code: 7}, HttpResponse: denial}, "false 418"},
		"denied with status 0":  {&authv3.CheckResponse{Status: &status.Status{}, HttpResponse: denial}, "false 418"},
		"denied without status": {&authv3.CheckResponse{HttpResponse: denial}, "false 418"},
		"denied in spite of ok": {&authv3.CheckResponse{Status: &status.Status{Code: 1}, HttpResponse: ok.GetHttpResponse()}, "false 403"},
		"negative code":         {&authv3.CheckResponse{Status: &status.Status{Code: -1}}, "false 403"},
		"nothing":               {&authv3.CheckResponse{}, "it has no status"},
		"nothing but metadata":  {&authv3.CheckResponse{DynamicMetadata: details}, "it has no status"},
		"an error of the server": {&authv3.CheckResponse{HttpResponse: &authv3.CheckResponse_ErrorResponse{
			ErrorResponse: &authv3.DeniedHttpResponse{},
		}}, ErrServer.Error()},
	} {
		answer, err := Read(framed(t, c.answer))
		got := fmt.Sprint(err)
		if err == nil {
			got = fmt.Sprint(answer.Allowed, " ", answer.Status)
		}
		if got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
	for status, want := range map[int32]int{199: 403, 200: 200, 204: 403, 205: 403, 304: 403, 599: 599, 600: 403, -1: 403, 0: 403} {
		denial.DeniedResponse.Status.Code = typev3.StatusCode(status)
		if got, err := Read(framed(t, &authv3.CheckResponse{HttpResponse: denial})); err != nil || got.Status != want || got.Allowed {
			t.Errorf("status %d: %+v, %v; want %d", status, got, err, want)
		}
	}
}

// Of two decisions in an answer the last one counts, as in every library of protobuf.
func TestReadTwice(t *testing.T) {
	ok := protowire.AppendBytes(protowire.AppendTag(nil, checkOK, protowire.BytesType), nil)
	denied := protowire.AppendBytes(protowire.AppendTag(nil, checkDenied, protowire.BytesType), nil)
	for _, c := range []struct {
		message []byte
		want    bool
	}{{append(append([]byte{}, ok...), denied...), false}, {append(append([]byte{}, denied...), ok...), true}} {
		b := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(c.message))), c.message...) //nolint:gosec // short
		if got, err := Read(b); err != nil || got.Allowed != c.want {
			t.Errorf("%x: %+v, %v", c.message, got, err)
		}
		var library authv3.CheckResponse
		if err := proto.Unmarshal(c.message, &library); err != nil || (library.GetOkResponse() != nil) != c.want {
			t.Errorf("%x: the library reads %v, %v", c.message, &library, err)
		}
	}
}

// A hostile server can neither pass for one that permits nor cost memory.
func FuzzRead(f *testing.F) {
	f.Add(framed(f, &authv3.CheckResponse{Status: &status.Status{Code: 7}}))
	f.Add([]byte{1, 0, 0, 0, 0})
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := Read(b)
		if err != nil {
			return
		}
		var library authv3.CheckResponse
		if proto.Unmarshal(b[framing:], &library) == nil && a.Allowed && library.GetStatus().GetCode() != 0 {
			t.Errorf("%x is permitted; the library reads %v", b, &library)
		}
	})
}

// Too many fields are refused.
func TestReadIsBounded(t *testing.T) {
	denial := &authv3.DeniedHttpResponse{}
	for range maxChanges + 1 {
		denial.Headers = append(denial.Headers, &corev3.HeaderValueOption{})
	}
	m := &authv3.CheckResponse{HttpResponse: &authv3.CheckResponse_DeniedResponse{DeniedResponse: denial}}
	if a, err := Read(framed(t, m)); err == nil {
		t.Errorf("%d fields are taken", len(a.Fields))
	}
}
