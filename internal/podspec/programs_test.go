package podspec

import (
	"strings"
	"testing"
)

func TestParsePrograms(t *testing.T) {
	sum := strings.Repeat("0a", 32)
	want := Program{Path: "/root/my clone/bin/backend", SHA256: sum}
	got, err := ParsePrograms("\n" + want.Line() + "\n")
	if err != nil || len(got) != 1 || got[0] != want {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	if got, err := ParsePrograms(""); err != nil || got != nil {
		t.Errorf("nothing: %v, %v", got, err)
	}
	for value, says := range map[string]string{
		"/root/x":                       "as sha256sum prints",
		sum + " /root/x":                "as sha256sum prints",
		sum[2:] + "  /root/x":           "as sha256sum prints",
		strings.ToUpper(sum) + "  /a/x": "as sha256sum prints",
		sum + "  root/x":                "absolute path",
		sum + "  /root/../etc/x":        "absolute path",
		strings.Repeat(want.Line()+"\n", maxPrograms+1): "at most 16",
	} {
		if _, err := ParsePrograms(value); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: error %v, want one with %q", value, err, says)
		}
	}
}
