package iptables

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
)

// Variant is the interface of the kernel that the programs speak to. Each has
// its own tables; packets meet both.
type Variant uint8

// The variants: nf_tables, and the older one of x_tables.
const (
	NFT Variant = iota
	Legacy
)

// String returns the word that iptables -V prints in parentheses.
func (v Variant) String() string {
	if v == Legacy {
		return "legacy"
	}
	return "nf_tables"
}

// word is how the variant is called in names of programs.
func (v Variant) word() string {
	if v == Legacy {
		return "legacy"
	}
	return "nft"
}

const (
	// lockWait is how many seconds iptables waits for another one to end.
	lockWait = 30
	// versionTimeout bounds the question what a program is or can do.
	versionTimeout = 10 * time.Second
	// runTimeout bounds one run of a program. Loading 50,000 Services takes
	// about a minute.
	runTimeout = 5 * time.Minute
	// outputBytes bounds what is kept of a program's output.
	outputBytes = 2000
)

// Tool runs the programs of one variant for one family. Their tables are those
// of the network namespace of the calling thread.
type Tool struct {
	family        svc.Family
	variant       Variant
	restore, save []string
	// ownLock is the lock of Restore's programs in place of the real one, nil for that.
	ownLock *os.File
}

// New finds the programs. It returns an error that wraps exec.ErrNotFound where
// they are not installed.
func New(v Variant, f svc.Family) (*Tool, error) {
	t := &Tool{family: f, variant: v}
	for _, p := range []struct {
		to   *[]string
		verb string
	}{{&t.restore, "restore"}, {&t.save, "save"}} {
		var err error
		if *p.to, err = t.find(p.verb); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// name is that of the programs: iptables or ip6tables.
func (t *Tool) name() string {
	if t.family == svc.IPv6 {
		return "ip6tables"
	}
	return "iptables"
}

// find returns the command line of a program: by the name that contains the
// variant, as the multi-call program, or by the plain name if its version prints
// that it is of the variant.
func (t *Tool) find(verb string) ([]string, error) {
	name := t.name() + "-" + t.variant.word() + "-" + verb
	if path, err := lookPath(name); err == nil {
		return []string{path}, nil
	}
	if path, err := lookPath("xtables-" + t.variant.word() + "-multi"); err == nil {
		return []string{path, t.name() + "-" + verb}, nil
	}
	plain, err := lookPath(t.name() + "-" + verb)
	if err != nil {
		return nil, fmt.Errorf("neither %s nor %s-%s is there: install iptables 1.8 or newer: %w", name, t.name(), verb, exec.ErrNotFound)
	}
	if v, err := version(plain); err != nil || v != t.variant {
		return nil, fmt.Errorf("%s is not there, and %s is of the other variant: %w", name, plain, exec.ErrNotFound)
	}
	return []string{plain}, nil
}

// lookPath searches PATH and the directories where iptables is installed: PATH of a
// service need not have the directories of the administrator's programs.
func lookPath(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err == nil {
		return path, nil
	}
	for _, dir := range []string{"/usr/sbin", "/sbin", "/usr/local/sbin"} {
		if p, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return p, nil
		}
	}
	return "", err
}

// Default is the variant of the plain name iptables, as the administrator or
// the distribution chose it.
func Default(ctx context.Context) (Variant, error) {
	path, err := lookPath("iptables")
	if err != nil {
		return 0, err
	}
	return version(path)
}

func version(path string) (Variant, error) {
	ctx, cancel := context.WithTimeout(context.Background(), versionTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "-V").Output()
	switch {
	case err != nil:
		return 0, fmt.Errorf("%s -V: %w", path, err)
	case bytes.Contains(out, []byte("nf_tables")):
		return NFT, nil
	}
	return Legacy, nil // before 1.8 nothing was said, and there was nothing else
}

// Variant is the variant of the programs.
func (t *Tool) Variant() Variant { return t.variant }

// Family is the family of the packets that the rules are for.
func (t *Tool) Family() svc.Family { return t.family }

// Error is what a program said when it failed.
type Error struct {
	Program string
	// Code is its exit code, -1 if it did not end by itself.
	Code int
	// Said is the end of its standard error.
	Said string
	err  error
}

// Error returns one line.
func (e *Error) Error() string {
	said := strings.Join(strings.Fields(e.Said), " ")
	if said == "" {
		said = e.err.Error()
	}
	return fmt.Sprintf("%s failed: %s", e.Program, said)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.err }

// busy is the exit code of iptables (RESOURCE_PROBLEM) when another one holds
// the lock, or memory is short.
const busy = 4

// Busy reports whether the change failed for a reason outside of it.
func (e *Error) Busy() bool { return e.Code == busy || e.Code < 0 }

// Restore makes the changes that input asks for, in the format of
// iptables-save, and does not change what it does not name. Each table is changed
// in one step or not at all.
func (t *Tool) Restore(ctx context.Context, input []byte) error {
	return t.run(ctx, t.restore, []string{"--noflush", "-w", strconv.Itoa(lockWait)}, input, nil)
}

// Save calls rule for each rule of a table in order, as a line of the form
// "-A CHAIN ...", and chain for each chain before that. Both are called with
// strings that the callee may keep. Reading a table of the legacy variant makes
// the kernel have it.
func (t *Tool) Save(ctx context.Context, table string, chain func(name string), rule func(chain, line string)) error {
	return t.run(ctx, t.save, []string{"-t", table}, nil, &reader{chain: chain, rule: rule})
}

// SaveAll is Save for all tables that the kernel has now; it adds none. The
// callbacks receive the table's name.
func (t *Tool) SaveAll(ctx context.Context, chain func(table, name string), rule func(table, chain, line string)) error {
	var now string
	return t.run(ctx, t.save, nil, nil, &reader{
		table: func(name string) { now = name },
		chain: func(name string) { chain(now, name) },
		rule:  func(name, line string) { rule(now, name, line) },
	})
}

// Tables is Save for all tables that the kernel has now; it adds none. Tables
// that iptables does not understand are left out.
func (t *Tool) Tables(ctx context.Context, chain func(name string), rule func(chain, line string)) error {
	return t.run(ctx, t.save, nil, nil, &reader{chain: chain, rule: rule, unread: func(string) {}})
}

// SavePolicies is Save with the policy of each chain, - for a chain that a program made.
func (t *Tool) SavePolicies(ctx context.Context, table string, chain func(name, policy string), rule func(chain, line string)) error {
	return t.run(ctx, t.save, []string{"-t", table}, nil, &reader{policy: chain, rule: rule})
}

func (t *Tool) run(ctx context.Context, program, args []string, input []byte, out *reader) error {
	ctx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, program[0], append(program[1:len(program):len(program)], args...)...)
	cmd.Env = append(cmd.Environ(), "LC_ALL=C")
	if t.ownLock != nil {
		cmd.Env = append(cmd.Env, lockFileVariable+"="+ownLockFile)
		cmd.ExtraFiles = []*os.File{t.ownLock}
	}
	cmd.WaitDelay = 5 * time.Second
	output := &tail{most: outputBytes}
	cmd.Stderr = output
	if input != nil {
		cmd.Stdin = bytes.NewReader(input)
	}
	fail := func(err error) error {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		code := -1
		if cmd.ProcessState != nil {
			code = cmd.ProcessState.ExitCode()
		}
		return &Error{Program: filepath.Base(program[0]), Code: code, Said: string(output.buf), err: err}
	}
	if out == nil {
		if err := cmd.Run(); err != nil {
			return fail(err)
		}
		return nil
	}
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return fail(err)
	}
	if err := cmd.Start(); err != nil {
		return fail(err)
	}
	readErr := out.read(bufio.NewReaderSize(pipe, 1<<16))
	if readErr != nil {
		_, _ = io.Copy(io.Discard, pipe) // so that it can end
	}
	if err := cmd.Wait(); err != nil {
		return fail(err)
	}
	if readErr != nil {
		return fail(readErr)
	}
	return nil
}

// tail is a writer that keeps the end.
type tail struct {
	buf  []byte
	most int
}

func (t *tail) Write(b []byte) (int, error) {
	t.buf = append(t.buf, b...)
	if over := len(t.buf) - t.most; over > 0 {
		t.buf = append(t.buf[:0], t.buf[over:]...)
	}
	return len(b), nil
}
