package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// backendCommand is the argument with which this program is the backend of a
// Pod instead.
const backendCommand = "backend"

// totalLimit bounds a whole run of everything.
const totalLimit = time.Hour

// bench is what all measurements use.
type bench struct {
	fairlead string // path of the program
	peers    string // folder of the peers' programs
	self     string // path of this program
	sources  string // folder of fairlead's sources
	corpus   string // folder of test/api
	dir      string // for logs and data
	small    bool
	peerless bool  // where peers have not been built
	nodes    []int // of the fleet
	shared   int   // watches of the fleet on a connection
	net      *network
}

func main() {
	if len(os.Args) == 2 && os.Args[1] == backendCommand {
		exit(backend())
	}
	if len(os.Args) == 4 && os.Args[1] == webCommand {
		exit(serveWeb(os.Args[2], os.Args[3]))
	}
	if len(os.Args) == 4 && os.Args[1] == copyCommand {
		exit(copyProxy(os.Args[2], os.Args[3]))
	}
	if len(os.Args) == 5 && os.Args[1] == watchCommand {
		exit(watchFleet(os.Args[2], os.Args[3], os.Args[4]))
	}
	b := &bench{}
	only := flag.String("run", "", "measurements to make, separated by commas: "+strings.Join(names(), ", ")+" (default: all)")
	flag.StringVar(&b.fairlead, "fairlead", "../bin/fairlead", "the fairlead program")
	flag.StringVar(&b.peers, "peers", "bin", "folder of the peers' programs")
	flag.BoolVar(&b.peerless, "without-peers", false, "leave out a peer that has not been built, rather than end")
	flag.StringVar(&b.corpus, "corpus", "../test/api", "folder of the requests that are compared")
	flag.StringVar(&b.sources, "sources", "..", "folder of fairlead's sources, for the table of names")
	flag.BoolVar(&b.small, "small", false, "make every measurement with so little that it only shows that it works")
	flag.Func("nodes", "numbers of nodes that fleet measures, separated by commas (default: 1000,5000,10000)", func(s string) (err error) {
		b.nodes, err = parseNodes(s)
		return err
	})
	flag.IntVar(&b.shared, "watches-per-connection", 50, "watches of fleet on a connection; with 2 each node has one of its own, as agents do")
	keep := flag.Bool("keep", false, "keep logs and data, and say where they are")
	flag.Parse()
	chosen, err := choose(*only)
	if err == nil && flag.NArg() > 0 {
		err = fmt.Errorf("unexpected argument %q", flag.Arg(0))
	}
	if err == nil && b.shared < 1 {
		err = fmt.Errorf("--watches-per-connection is %d; want at least 1", b.shared)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(2)
	}
	if err := b.unbuilt(chosen); err != nil {
		exit(err)
	}
	if os.Getenv(insideEnv) == "" {
		os.Exit(reexec())
	}
	exit(b.main(chosen, *keep))
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func names() []string {
	var out []string
	for _, r := range runs() {
		out = append(out, r.name)
	}
	return out
}

// choose returns the measurements that a comma-separated list names.
func choose(only string) ([]run, error) {
	if only == "" {
		return runs(), nil
	}
	var out []run
	for name := range strings.SplitSeq(only, ",") {
		i := slices.Index(names(), name)
		if i < 0 {
			return nil, fmt.Errorf("no measurement %q; there are %s", name, strings.Join(names(), ", "))
		}
		out = append(out, runs()[i])
	}
	return out, nil
}

func (b *bench) main(chosen []run, keep bool) (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, totalLimit)
	defer cancel()
	if err := b.prepare(ctx); err != nil {
		return err
	}
	defer func() {
		if keep || err != nil {
			fmt.Fprintln(os.Stderr, "bench: logs and data are in", b.dir)
			return
		}
		err = os.RemoveAll(b.dir)
	}()
	fmt.Println(machine())
	var figures []figure
	var failed []error
	for _, r := range chosen {
		if missing := b.missing(r); missing != "" {
			b.say("%s is left out: it takes %s", r.name, missing)
			continue
		}
		b.say("%s: %s", r.name, r.about)
		begin := time.Now()
		got, err := r.measure(b, ctx)
		b.say("%s took %s", r.name, time.Since(begin).Round(time.Second))
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", r.name, err))
		}
		for i := range got {
			got[i].run = r.name
		}
		figures = append(figures, got...)
		if ctx.Err() != nil {
			break
		}
	}
	if err := printTable(os.Stdout, figures, !b.small); err != nil {
		return err
	}
	return errors.Join(failed...)
}

// prepare finds the programs and makes the network.
func (b *bench) prepare(ctx context.Context) (err error) {
	if b.self, err = os.Executable(); err != nil {
		return err
	}
	if b.fairlead, err = filepath.Abs(b.fairlead); err != nil {
		return err
	}
	if _, err := os.Stat(b.fairlead); err != nil {
		return fmt.Errorf("%w; build it with make build, or name it with --fairlead", err)
	}
	if b.peers, err = filepath.Abs(b.peers); err != nil {
		return err
	}
	if b.corpus, err = filepath.Abs(b.corpus); err != nil {
		return err
	}
	if err := settle(); err != nil {
		return err
	}
	if b.net, err = newNetwork(ctx); err != nil {
		return err
	}
	b.dir, err = os.MkdirTemp("", "fairlead-bench-")
	return err
}

// unbuilt is an error if a peer is missing that make builds.
func (b *bench) unbuilt(chosen []run) error {
	if b.peerless {
		return nil
	}
	for _, r := range chosen {
		for _, name := range r.programs() {
			if b.peer(name) == "" {
				return fmt.Errorf("%s is measured against %s, which is not in %s: build it with make bench RUN=%s, or leave it out with "+
					"--without-peers", r.name, name, b.peers, r.name)
			}
		}
	}
	return nil
}

// missing names a need of r that is missing, empty if there is none.
func (b *bench) missing(r run) string {
	for _, name := range r.needs {
		switch {
		case name == needsBPF && !canAttach():
			return name
		case name != needsBPF && b.peer(name) == "":
			return name + ", which has not been built (make peers)"
		}
	}
	return ""
}

// peer is the path of a peer's program, empty if it has not been built.
func (b *bench) peer(name string) string {
	path := filepath.Join(b.peers, name)
	if _, err := os.Stat(path); err != nil {
		return ""
	}
	return path
}

// say shows progress.
func (b *bench) say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "bench: "+format+"\n", args...)
}

// machine describes where the figures come from. With a load average near the
// number of processors they say little.
func machine() string {
	var u unix.Utsname
	_ = unix.Uname(&u)
	load, _ := os.ReadFile("/proc/loadavg")
	return fmt.Sprintf("Linux %s, %d processors, load average at the start %s\n",
		unix.ByteSliceToString(u.Release[:]), runtime.NumCPU(), strings.Join(strings.Fields(string(load))[:3], " "))
}
