package parts

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/dataplane"
	kconnect "github.com/fairlead/fairlead/internal/kernel/connect"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
)

func TestConnectTimeFlags(t *testing.T) {
	for _, c := range []struct {
		flags   connectFlags
		mode    string
		balance dataplane.Balance
		want    string // part of the error
	}{
		{connectFlags{value: "off"}, "ipvs", dataplane.RoundRobin, ""},
		{connectFlags{value: "on"}, "auto", dataplane.Random, ""},
		{connectFlags{value: "on", cgroup: "/sys/fs/cgroup"}, "nft", dataplane.Random, ""},
		{connectFlags{value: "auto"}, "nft", dataplane.Random, ""},
		{connectFlags{value: "auto", cgroup: "/sys/fs/cgroup"}, "ipvs", dataplane.RoundRobin, ""},
		{connectFlags{value: "auto", cgroup: "here"}, "nft", dataplane.Random, "absolute path"},
		{connectFlags{value: "yes"}, "nft", dataplane.Random, `--connect-time is "yes"`},
		{connectFlags{value: "on"}, "ipvs", dataplane.Random, "in front of mode nft"},
		{connectFlags{value: "on"}, "nft", dataplane.RoundRobin, "--balance roundrobin"},
		{connectFlags{value: "on", cgroup: "here"}, "nft", dataplane.Random, "absolute path"},
		{connectFlags{value: "off", cgroup: "/sys/fs/cgroup"}, "nft", dataplane.Random, "no effect"},
	} {
		err := c.flags.check(c.mode, c.balance)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v, mode %s: %v, want %q", c.flags, c.mode, err, c.want)
		}
	}
}

// With connect-time the proxy starts in no other mode, and 'fairlead check' asks for both.
func TestConnectTimeHasNoFallback(t *testing.T) {
	f := &ProxyFlags{mode: modeAuto, connect: connectFlags{value: "on"}}
	if got := f.candidates(); len(got) != 1 || got[0].name != "nft" {
		t.Errorf("%d modes are tried, want only nft", len(got))
	}
	f.connect.cgroup = t.TempDir()
	err := f.candidates()[0].probe(t.Context(), &modeSetup{flags: f})
	if err == nil {
		t.Error("a folder that is no control group is accepted")
	}
}

// mountBPF has a BPF file system at its usual place, in the mount namespace of the test.
func mountBPF(t *testing.T) {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(kconnect.DefaultFS, &st); err == nil && st.Type == unix.BPF_FS_MAGIC {
		return
	}
	if err := unix.Mount("bpf", kconnect.DefaultFS, "bpf", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(kconnect.DefaultFS, unix.MNT_DETACH) })
}

// The programs are in force after the first Apply, stay when the process ends, and go with the next start without connect-time, and
// with a cleanup of all modes.
func TestConnectTimeComesAndGoes(t *testing.T) {
	group := testbed.Group(t).Dir
	mountBPF(t)
	present := func(when string, want bool) {
		t.Helper()
		if is, err := kconnect.Present(""); err != nil || is != want {
			t.Errorf("%s: the programs are there: %v, %v; want %v", when, is, err, want)
		}
	}
	for name, end := range map[string]func() error{
		"the next start without it": (&connectFlags{value: "off"}).detach,
		"a cleanup":                 func() error { return CleanUpModes(t.Context(), "") },
	} {
		f := &ProxyFlags{mode: modeAuto, connect: connectFlags{value: "on", cgroup: group}}
		var o proxy.Options
		setup := &modeSetup{flags: f, log: slog.New(slog.DiscardHandler)}
		if err := f.candidates()[0].open(setup, &o); err != nil {
			t.Fatal(err)
		}
		present("before the first Apply", false)
		if err := errors.Join(o.Dataplane.Apply(t.Context(), table.New(), nil), o.Dataplane.Close()); err != nil {
			t.Fatal(err)
		}
		if err := (&connectFlags{in: true}).detach(); err != nil {
			t.Error(err)
		}
		if err := CleanUpModes(t.Context(), "nft"); err != nil {
			t.Error(err)
		}
		present("after the end of the process", true)
		if err := end(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		present(name, false)
	}
}

// auto is in front where everything works, and gives the reason elsewhere.
func TestConnectTimeAuto(t *testing.T) {
	group := testbed.Group(t).Dir
	mountBPF(t)
	for name, c := range map[string]struct {
		flags   connectFlags
		mode    string
		balance dataplane.Balance
		in      bool
		shown   string
	}{
		"works":            {connectFlags{value: "auto", cgroup: group}, "nft", dataplane.Random, true, "on"},
		"on":               {connectFlags{value: "on", cgroup: group}, "nft", dataplane.Random, true, "on"},
		"off":              {connectFlags{value: "off"}, "nft", dataplane.Random, false, ""},
		"not given":        {connectFlags{}, "nft", dataplane.Random, false, ""},
		"another mode":     {connectFlags{value: "auto"}, "iptables", dataplane.Random, false, "off: it works in front of mode nft"},
		"roundrobin":       {connectFlags{value: "auto"}, "nft", dataplane.RoundRobin, false, "off: it chooses endpoints at random"},
		"no control group": {connectFlags{value: "auto", cgroup: t.TempDir()}, "nft", dataplane.Random, false, "is not a control group"},
	} {
		f := &ProxyFlags{connect: c.flags}
		m, shown := f.connectTime(proxyMode{name: c.mode}, &modeSetup{flags: f, balance: c.balance, log: slog.New(slog.DiscardHandler)})
		if m.name != c.mode || f.connect.in != c.in || (shown == "") != (c.shown == "") || !strings.Contains(shown, c.shown) {
			t.Errorf("%s: mode %s, in front %v, %q; want %v, %q", name, m.name, f.connect.in, shown, c.in, c.shown)
		}
		if no := f.NoMesh(c.mode); c.mode == "nft" && (no != "") != c.in {
			t.Errorf("%s: %q", name, no)
		}
	}
	// 'fairlead check' looks at it only if it is left to choose.
	auto := &ProxyFlags{connect: connectFlags{value: "auto", cgroup: t.TempDir()}}
	if all := auto.Features(); len(all) != 1 || all[0].Probe() == nil {
		t.Errorf("%d features, or a folder that is no control group is accepted", len(all))
	}
	if all := (&ProxyFlags{connect: connectFlags{value: "on"}}).Features(); len(all) != 0 {
		t.Error("on is no feature but a mode that must work")
	}
}
