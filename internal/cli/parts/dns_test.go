package parts

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/cli/base"
)

func TestDNSFlags(t *testing.T) {
	var f DNSFlags
	f.Add(&cobra.Command{}) // the defaults
	f.Upstream, f.podMode = []string{"192.0.2.1", "192.0.2.2:5353", "tls://192.0.2.3#dns.example"}, "verified"
	f.stubs = []string{"corp.example=192.0.2.9", "corp.example=192.0.2.10:54"}
	o, err := f.Options(base.NetworkFlags{})
	if err != nil {
		t.Fatal(err)
	}
	got := fmt.Sprintf("%v %s %s %v %s", o.Upstream, o.TLSUpstream[0].Addr, o.TLSUpstream[0].ServerName, o.Stubs, o.Pods)
	want := "[192.0.2.1:53 192.0.2.2:5353] 192.0.2.3:853 dns.example [{corp.example [192.0.2.9:53 192.0.2.10:54]}] verified"
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	var file DNSFlags
	file.Add(&cobra.Command{})
	if o, err := file.Options(base.NetworkFlags{}); err != nil || o.ResolvConf != "/etc/resolv.conf" || o.Upstream != nil {
		t.Errorf("a file: %+v, %v", o, err)
	}
	for want, change := range map[string]func(*DNSFlags){
		"--pod-records":           func(f *DNSFlags) { f.podMode = "some" },
		"--stub-domain: \"x\"":    func(f *DNSFlags) { f.stubs = []string{"x"} },
		"--upstream: \"tls://x\"": func(f *DNSFlags) { f.Upstream = []string{"tls://x"} },
	} {
		var bad DNSFlags
		bad.Add(&cobra.Command{})
		change(&bad)
		var usage base.UsageError
		if _, err := bad.Options(base.NetworkFlags{}); !errors.As(err, &usage) || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one of usage with %s", err, want)
		}
	}
}

// The flags of the cache and the upstreams arrive in the server's options.
func TestDNSLimitFlags(t *testing.T) {
	cmd := &cobra.Command{}
	var f DNSFlags
	f.Add(cmd)
	if err := cmd.ParseFlags([]string{"--dns-ttl=30", "--dns-cache-size=7", "--dns-max-in-flight=8", "--upstream-timeout=3s",
		"--upstream-policy=sequential", "--dns-prefetch=false", "--dns-serve-stale=0", "--dns-lameduck=1s"}); err != nil {
		t.Fatal(err)
	}
	o, err := f.Options(base.NetworkFlags{})
	if err != nil {
		t.Fatal(err)
	}
	if o.TTL != 30 || o.CacheSize != 7 || o.MaxInFlight != 8 || o.Timeout != 3*time.Second || !o.Sequential || !o.NoPrefetch ||
		o.Stale >= 0 || o.Lameduck != time.Second {
		t.Errorf("%+v", o)
	}
}
