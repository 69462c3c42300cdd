package api

import (
	"encoding/json"
	"testing"
)

// The level of a Pod is no difference: nothing of it stays, and nothing else goes.
func TestLevelIsNoDifference(t *testing.T) {
	strip := func(text string) string {
		var v any
		if err := json.Unmarshal([]byte(text), &v); err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(withoutLevel(v))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	for in, want := range map[string]string{
		`{"metadata":{"annotations":{"fairlead.dev/pod-security":"baseline"},"name":"a","x":null}}`:     `{"metadata":{"name":"a","x":null}}`,
		`{"metadata":{"annotations":{"a":"b","fairlead.dev/pod-security":"baseline"}}}`:                 `{"metadata":{"annotations":{"a":"b"}}}`,
		`{"items":[{"f:metadata":{"f:annotations":{".":{},"f:fairlead.dev/pod-security":{}}},"s":{}}]}`: `{"items":[{"s":{}}]}`,
		`{"f:annotations":{".":{},"f:a":{}}}`:                                                           `{"f:annotations":{".":{},"f:a":{}}}`,
	} {
		if got := strip(in); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}
