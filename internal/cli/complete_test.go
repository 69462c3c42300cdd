package cli

import (
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/cli/base"
)

// A shell completes the values of flags.
func TestCompletion(t *testing.T) {
	t.Setenv("KUBECONFIG", "/nonexistent") // names come from no API here
	for line, want := range map[string]string{
		"proxy --mode ":                          "auto nft iptables ipvs userspace",
		"up --log-level ":                        "debug info warn error",
		"agent --upstream-policy ":               "random sequential",
		"dns --pod-records ":                     "insecure verified disabled",
		"status -o ":                             "table json",
		"server --controllers endpointslice,end": "endpointslice,endpoints endpointslice,endpointslicemirroring endpointslice,endpointcheck",
		"proxy --balance ":                       "random roundrobin",
		"run --node ":                            "",
		"token revoke ":                          "",
		"stat":                                   "status",
	} {
		words := strings.Split(line, " ")
		code, out, _ := call(t, append([]string{"__completeNoDesc"}, words...)...)
		lines := strings.Split(strings.TrimSpace(out), "\n")
		got := strings.Join(lines[:len(lines)-1], " ") // the last is the directive
		if code != exitDone || got != want {
			t.Errorf("%q: exit code %d, %q, want %q", line, code, got, want)
		}
	}
}

func TestSlip(t *testing.T) {
	for _, x := range []struct {
		typed, meant string
		want         bool
	}{
		{"ntf", "nft", true}, {"nfs", "nft", true}, {"INFO", "info", true}, {"statsu", "status", true}, {"node-nam", "node-name", true},
		{"x", "nft", false}, {"web", "db", false}, {"", "a", false}, {"yaml", "json", false},
	} {
		if got := base.IsSlip(x.typed, x.meant); got != x.want {
			t.Errorf("slip(%q, %q) = %t", x.typed, x.meant, got)
		}
	}
}
