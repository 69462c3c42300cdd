package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// binEnv names the directory of the programs, which make test has built. Main
// sets it where it is not.
const binEnv = "FAIRLEAD_BIN"

// sources are the programs, by their directory in the repository and package.
var sources = map[string]struct{ dir, pkg string }{
	"fairlead":     {".", "./cmd/fairlead"},
	"apiserver":    {".", "./test/apiserver"},
	"backend":      {".", "./examples/backend"},
	"kubectl":      {"test/kubectl", "."},
	"wireguard-go": {"test/wireguard", "golang.zx2c4.com/wireguard"},
}

// Program is the path of one of the programs in a test whose TestMain calls Main.
func Program(name string) string { return filepath.Join(os.Getenv(binEnv), name) }

// Main builds the programs, unless $FAIRLEAD_BIN is set, and exits with the code
// of run, which may be testing.M.Run.
func Main(run func() int, names ...string) {
	code, err := withPrograms(run, names)
	if err != nil {
		fmt.Fprintln(os.Stderr, "process:", err)
		code = 1
	}
	os.Exit(code)
}

func withPrograms(run func() int, names []string) (code int, err error) {
	if os.Getenv(binEnv) != "" {
		return run(), nil
	}
	dir, err := os.MkdirTemp("", "fairlead-bin-")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	for _, name := range names {
		if err := build(name, dir); err != nil {
			return 0, err
		}
	}
	if err := os.Setenv(binEnv, dir); err != nil {
		return 0, err
	}
	return run(), nil
}

// Put puts a program into dir: a link or a copy of that in $FAIRLEAD_BIN, or one
// that is built.
func Put(name, dir string) error {
	if os.Getenv(binEnv) == "" {
		return build(name, dir)
	}
	from, to := Program(name), filepath.Join(dir, name)
	if os.Link(from, to) == nil {
		return nil
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

func build(name, dir string) error {
	s := sources[name]
	return compile(context.Background(), filepath.Join(dir, name), s.dir, s.pkg, "build")
}

// Build builds a program that one test needs, without cgo, and returns its path. dir, relative to the
// repository, is in the module whose package pkg is; flags are passed to go build.
func Build(t testing.TB, dir, pkg string, flags ...string) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), path.Base(path.Join(dir, pkg)))
	if err := compile(t.Context(), to, dir, pkg, slices.Concat([]string{"build"}, flags)...); err != nil {
		t.Fatal(err)
	}
	return to
}

// BuildTest is Build for the program of a package's tests.
func BuildTest(t testing.TB, dir, pkg string) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), path.Base(path.Join(dir, pkg))+".test")
	if err := compile(t.Context(), to, dir, pkg, "test", "-c", "-vet=off"); err != nil {
		t.Fatal(err)
	}
	return to
}

// buildTimeout bounds one build; a machine under load without a cache takes minutes.
const buildTimeout = 10 * time.Minute

// compile runs a command of go, build or test, which makes a program. Only a debugger would read what -s -w leaves out, and
// writing it takes a third of the linker's processor time; flags in command override it.
func compile(ctx context.Context, to, dir, pkg string, command ...string) error {
	root, err := repository()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, buildTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", slices.Concat(command[:1], []string{"-ldflags=-s -w"}, command[1:], []string{"-o", to, pkg})...)
	cmd.Dir, cmd.Env = filepath.Join(root, dir), append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s of %s in %s: %w\n%s", command[0], pkg, cmd.Dir, err, out)
	}
	return nil
}

// repository is the first directory upwards that has cmd/fairlead.
func repository() (string, error) {
	here, err := os.Getwd()
	for dir := here; err == nil; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, sources["fairlead"].pkg)); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("%s is not in the repository", here)
		}
	}
	return "", err
}
