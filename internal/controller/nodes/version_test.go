package nodes

import "testing"

func TestSkewed(t *testing.T) {
	for _, c := range []struct {
		server, agent string
		want          bool
	}{
		{"v1.4.0", "v1.4.9", false}, {"v1.4.0", "v1.3.0", false}, {"v1.4.0", "v1.5.0-rc.1", false}, {"v1.4.0-12-gabcdef0", "v1.3.2", false},
		{"v1.4.0", "v1.2.9", true}, {"v1.4.0", "v1.6.0", true}, {"v2.0.0", "v1.9.0", true}, {"v1.0.0", "v2.0.0", true},
		{"31a322a", "v1.2.0", false}, {"v1.4.0", "unknown", false}, {"v1.4.0", "", false},
	} {
		if message, got := skewed(c.server, c.agent); got != c.want || got != (message != "") {
			t.Errorf("skewed(%s, %s) = %q, %t, want %t", c.server, c.agent, message, got, c.want)
		}
	}
}
