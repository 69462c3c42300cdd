package parts

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/dataplane"
	kconnect "github.com/fairlead/fairlead/internal/kernel/connect"
	"github.com/fairlead/fairlead/internal/preflight"
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
		{connectFlags{value: "on"}, "iptables", dataplane.Random, ""},
		{connectFlags{value: "on"}, "ipvs", dataplane.Random, "in front of modes nft and iptables; with --mode ipvs"},
		{connectFlags{value: "on"}, "userspace", dataplane.Random, "in front of modes nft and iptables"},
		{connectFlags{value: "on"}, "iptables", dataplane.RoundRobin, "--balance roundrobin"},
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

// With connect-time the proxy starts in no mode without it, and 'fairlead check' asks for both.
func TestConnectTimeHasNoFallback(t *testing.T) {
	for mode, want := range map[string]string{modeAuto: "nft iptables", "nft": "nft", "iptables": "iptables"} {
		f := &ProxyFlags{mode: mode, connect: connectFlags{value: "on", cgroup: t.TempDir()}}
		var names []string
		for _, m := range f.candidates() {
			names = append(names, m.name)
			err := m.probe(t.Context(), &modeSetup{flags: f, log: slog.New(slog.DiscardHandler)})
			if err == nil || !strings.Contains(err.Error(), "is not a control group") {
				t.Errorf("mode %s with a folder that is no control group: %v", m.name, err)
			}
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("--mode %s tries %q, want %q", mode, got, want)
		}
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
	for name, c := range map[string]struct {
		mode string
		end  func() error
	}{
		"the next start without it":              {"nft", (&connectFlags{value: "off"}).detach},
		"a cleanup":                              {"nft", func() error { return CleanUpModes(t.Context(), "") }},
		"the next start without it, of iptables": {"iptables", (&connectFlags{value: "off"}).detach},
	} {
		f := &ProxyFlags{mode: c.mode, connect: connectFlags{value: "on", cgroup: group}}
		var o proxy.Options
		setup := &modeSetup{flags: f, log: slog.New(slog.DiscardHandler)}
		m := f.candidates()[0]
		if err := m.probe(t.Context(), setup); err != nil {
			t.Fatal(err)
		}
		if err := m.open(setup, &o); err != nil {
			t.Fatal(err)
		}
		present("before the first Apply", false)
		if err := errors.Join(o.Dataplane.Apply(t.Context(), table.New(), nil), o.Dataplane.Close()); err != nil {
			t.Fatal(err)
		}
		if err := (&connectFlags{in: true}).detach(); err != nil {
			t.Error(err)
		}
		if err := CleanUpModes(t.Context(), c.mode); err != nil {
			t.Error(err)
		}
		present("after the end of the process", true)
		if err := c.end(); err != nil {
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
		"iptables":         {connectFlags{value: "auto", cgroup: group}, "iptables", dataplane.Random, true, "on"},
		"another mode":     {connectFlags{value: "auto"}, "ipvs", dataplane.Random, false, "off: it works in front of modes nft and iptables"},
		"roundrobin":       {connectFlags{value: "auto"}, "nft", dataplane.RoundRobin, false, "off: it chooses endpoints at random"},
		"no control group": {connectFlags{value: "auto", cgroup: t.TempDir()}, "nft", dataplane.Random, false, "is not a control group"},
	} {
		f := &ProxyFlags{connect: c.flags}
		m, shown := f.connectTime(candidateModes(c.mode)[0], &modeSetup{flags: f, balance: c.balance, log: slog.New(slog.DiscardHandler)})
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

// Where the control group is narrower than the Pods' own groups, 'fairlead check' and 'fairlead explain' name the groups outside of it.
func TestPodsOutsideOfTheGroup(t *testing.T) {
	group := testbed.Group(t).Dir
	mountBPF(t)
	inside, outside := filepath.Join(group, "pod1.scope"), group+"-pod2.scope"
	node := testbed.NewNetwork(t).Host("node")
	for name, dir := range map[string]string{"one": inside, "two": outside} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { testbed.Until(t, dir+" to be empty", func() error { return os.Remove(dir) }) })
		ctx, stop := context.WithCancel(t.Context())
		cmd := node.Pod(name).Command(ctx, "sh", "-c", `echo $$ > "$0/cgroup.procs" && exec sleep 600`, dir)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { stop(); _ = cmd.Wait() })
		testbed.Until(t, name+" to be in its group", func() error {
			procs, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
			if err == nil && len(procs) == 0 {
				err = errors.New("there is no process")
			}
			return err
		})
	}
	for name, c := range map[string]struct {
		flags connectFlags
		finds bool
	}{
		"on":                {connectFlags{value: "on", cgroup: group}, true},
		"auto":              {connectFlags{value: "auto", cgroup: group}, true},
		"both are below it": {connectFlags{value: "on", cgroup: filepath.Dir(group)}, false},
		"off":               {connectFlags{value: "off"}, false},
	} {
		node.Do(func() {
			var findings []preflight.Finding
			for _, f := range (preflight.Machine{Features: c.flags.features()}).Check(t.Context()) {
				if f.Check == "connect-time of Pods" && f.Level == preflight.Warning {
					findings = append(findings, f)
				}
			}
			facts := factsOf(&proxy.View{Table: table.New()}, proxy.Status{ConnectTimeCgroup: c.flags.cgroup})
			if !c.finds {
				if len(findings) > 0 || facts.Uncovered != nil {
					t.Errorf("%s: %+v, %+v; want nothing", name, findings, facts.Uncovered)
				}
				return
			}
			if len(findings) != 1 || facts.Uncovered == nil {
				t.Errorf("%s: %+v, %+v; want a finding of both", name, findings, facts.Uncovered)
				return
			}
			for _, text := range []string{findings[0].Message, facts.Uncovered.Text} {
				if !strings.Contains(text, "in /"+filepath.Base(outside)+" (process ") || strings.Contains(text, filepath.Base(inside)) {
					t.Errorf("%s: %q, want it to name %s and not %s", name, text, outside, inside)
				}
			}
			if two := node.Pod("two"); !slices.Contains(facts.Uncovered.Addresses, two.Addr4()) || len(facts.Uncovered.Addresses) != 2 {
				t.Errorf("%s: the Pods' addresses are %v, want %s and its IPv6 address", name, facts.Uncovered.Addresses, two.Addr4())
			}
			for _, text := range []string{findings[0].Remedy, facts.Uncovered.Remedy} {
				if !strings.Contains(text, "name "+filepath.Dir(group)+" with --connect-time-cgroup") {
					t.Errorf("%s: %q does not name %s", name, text, filepath.Dir(group))
				}
			}
		})
	}
}
