package node

import (
	"testing"

	"github.com/spf13/cobra"
)

// What Pods ask comes to the node-local DNS server at the port of the Service, to others at --dns-port.
func TestDNSPortOfPods(t *testing.T) {
	for args, want := range map[string]uint16{"--node-local-dns=true": 53, "--node-local-dns=false": 10099} {
		var f Flags
		cmd := &cobra.Command{Use: "agent"}
		f.DNS.add(cmd)
		if err := cmd.ParseFlags([]string{"--dns-port", "10099", args}); err != nil {
			t.Fatal(err)
		}
		if got := f.packets().DNSPort; got != want {
			t.Errorf("%s: the agent looks at port %d, want %d", args, got, want)
		}
		if got := f.Machine(t.TempDir(), false).DNSPort; got != want {
			t.Errorf("%s: the check looks at port %d, want %d", args, got, want)
		}
	}
}
