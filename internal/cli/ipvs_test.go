package cli

import (
	"bytes"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/kernel/ipvs"
	"github.com/fairlead/fairlead/internal/proxy"
)

func ipvsFlagsOf(t *testing.T, args ...string) *ipvsFlags {
	t.Helper()
	var f ipvsFlags
	flags := pflag.NewFlagSet("proxy", pflag.ContinueOnError)
	f.add(flags)
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	return &f
}

// behaviour 59: where IPVS does not work, another mode does, and says why; unless
// that is not wanted.
func TestFallbackOfIPVS(t *testing.T) {
	if c, err := ipvs.Dial(); err == nil {
		_ = c.Close()
		t.Skip("this kernel has IPVS: nothing to fall back from")
	} else if !errors.Is(err, ipvs.ErrNotSupported) {
		t.Fatal(err)
	}
	var said bytes.Buffer
	log := slog.New(slog.NewTextHandler(&said, nil))
	var o proxy.Options
	mode, err := ipvsFlagsOf(t).options(log, "auto", &o)
	if err != nil || o.Dataplane != nil || mode != "iptables" && mode != "nft" {
		t.Fatalf("mode %q, %v", mode, err)
	}
	for _, text := range []string{said.String(), o.FallbackReason} {
		if !strings.Contains(text, "proxy mode "+mode+" is taken") || !strings.Contains(text, "the kernel has no IPVS") {
			t.Errorf("said %q", text)
		}
	}
	o = proxy.Options{}
	_, err = ipvsFlagsOf(t, "--mode-strict").options(log, "auto", &o)
	if !errors.Is(err, ipvs.ErrNotSupported) || !strings.Contains(err.Error(), "--mode-strict") || o.FallbackReason != "" {
		t.Errorf("with --mode-strict: %v", err)
	}
}

// A missing scheduler is a reason to fall back.
func TestWhatIPVSFallsBackFrom(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	f := ipvsFlagsOf(t)
	mode, why, err := f.fallback(log, errors.New("the kernel lacks scheduler sed (module ip_vs_sed)"))
	if err != nil || mode == "" || !strings.Contains(why, "lacks scheduler sed") {
		t.Errorf("%q, %q, %v", mode, why, err)
	}
}

func TestIPVSFlagsAreChecked(t *testing.T) {
	services := []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}
	for want, args := range map[string][]string{
		`--ipvs-scheduler is "random"; want one of rr`:               {"--ipvs-scheduler", "random"},
		"--ipvs-sync-period is 0s":                                   {"--ipvs-sync-period", "0s"},
		"--ipvs-min-sync-period 1m0s":                                {"--ipvs-min-sync-period", "1m"},
		"10.96.1.0/24 overlaps the range of ClusterIPs 10.96.0.0/16": {"--ipvs-exclude-cidrs", "10.96.1.0/24"},
		"192.0.2.0/24 and 192.0.2.128/25 overlap":                    {"--ipvs-exclude-cidrs", "192.0.2.0/24,192.0.2.128/25"},
		"UDP timeout -1s":                                            {"--ipvs-udp-timeout=-1s"},
	} {
		err := ipvsFlagsOf(t, args...).check(services)
		var usage usageError
		if !errors.As(err, &usage) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", args, err, want)
		}
	}
	if f := ipvsFlagsOf(t); f.sync != 30*time.Second || f.scheduler != "rr" || f.check(services) != nil {
		t.Errorf("defaults %+v", f)
	}
}

func TestWarnOfLoopback(t *testing.T) {
	for text, want := range map[string]int{"": 0, "192.0.2.0/24": 0, "192.0.2.0/24, 127.0.0.0/8": 1, "127.0.0.1/32": 1, "0.0.0.0/0": 1, "::/0": 0, "primary": 0} {
		var said bytes.Buffer
		warnOfLoopback(slog.New(slog.NewTextHandler(&said, nil)), strings.Split(text, ","))
		if got := strings.Count(said.String(), "do not answer on 127.0.0.0/8"); got != want {
			t.Errorf("%q: %d warnings, want %d: %s", text, got, want, said.String())
		}
	}
}
