package parts

import (
	"bytes"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/cli/base"
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
		var usage base.UsageError
		if !errors.As(err, &usage) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", args, err, want)
		}
	}
	if f := ipvsFlagsOf(t); f.sync != 30*time.Second || f.scheduler != "rr" || f.check(services) != nil {
		t.Errorf("defaults %+v", f)
	}
}

func TestWarnOfLoopback(t *testing.T) {
	for text, want := range map[string]int{
		"": 0, "192.0.2.0/24": 0, "192.0.2.0/24, 127.0.0.0/8": 1, "127.0.0.1/32": 1, "0.0.0.0/0": 1, "::/0": 0, "primary": 0,
	} {
		var said bytes.Buffer
		warnOfLoopback(slog.New(slog.NewTextHandler(&said, nil)), strings.Split(text, ","))
		if got := strings.Count(said.String(), "do not answer on 127.0.0.0/8"); got != want {
			t.Errorf("%q: %d warnings, want %d: %s", text, got, want, said.String())
		}
	}
}
