package process

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const (
	// previousEnv names the fairlead to upgrade from, which is built from the history where it does not.
	previousEnv = "FAIRLEAD_PREVIOUS"
	// PreviousVersion is the version of a fairlead that Previous has built.
	PreviousVersion = "v0.0.1-previous"
)

// Previous returns the path of the fairlead to upgrade from: the one that $FAIRLEAD_PREVIOUS names, or one that is
// built of the newest tag before the checkout's commit, or of the commit before where there is none. It skips the test
// where that commit is not there. The files that differ are laid over those of the checkout, so that Go's build cache
// has the packages that are alike.
func Previous(t testing.TB) string {
	t.Helper()
	if path := os.Getenv(previousEnv); path != "" {
		return path
	}
	root, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	git := func(args ...string) (string, error) {
		out, err := exec.CommandContext(t.Context(), "git", append([]string{"-C", root, "-c", "safe.directory=*"}, args...)...).Output()
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("git %s: %w: %s", strings.Join(args, " "), err, exit.Stderr)
		}
		return string(out), err
	}
	base, err := git("rev-parse", "--verify", "HEAD~1^{commit}")
	if err != nil {
		t.Skipf("there is nothing to upgrade from; fetch more of the history, or name a program by %s: %v", previousEnv, err)
	}
	if tag, err := git("describe", "--tags", "--abbrev=0", "HEAD~1"); err == nil {
		base = tag
	}
	dir := t.TempDir()
	overlay, err := overlayOf(root, dir, strings.TrimSpace(base), git)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "fairlead")
	// The variable of the version was internal/cli.version; the linker ignores the one that is missing.
	version := ""
	for _, variable := range []string{"cli.version", "cli/base.Version"} {
		version += " -X github.com/fairlead/fairlead/internal/" + variable + "=" + PreviousVersion
	}
	cmd := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-overlay", overlay, "-o", path,
		"-ldflags", "-s -w"+version, "./cmd/fairlead")
	cmd.Dir, cmd.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", strings.TrimSpace(base), err, out)
	}
	return path
}

// overlayOf writes the file for go build's -overlay that makes of the checkout in root the commit base.
func overlayOf(root, dir, base string, git func(args ...string) (string, error)) (string, error) {
	changed, err1 := git("diff", "--no-renames", "--name-only", "-z", base)
	added, err2 := git("ls-files", "--others", "--exclude-standard", "-z")
	had, err3 := git("ls-tree", "-r", "--name-only", "-z", base)
	if err := errors.Join(err1, err2, err3); err != nil {
		return "", err
	}
	before := map[string]bool{}
	for name := range strings.SplitSeq(had, "\x00") {
		before[name] = true
	}
	replace := map[string]string{}
	for name := range strings.SplitSeq(changed+added, "\x00") {
		switch {
		case name == "":
		case !before[name]:
			replace[filepath.Join(root, name)] = "" // the file is not there
		default:
			text, err := git("show", base+":"+name)
			if err != nil {
				return "", err
			}
			to := filepath.Join(dir, fmt.Sprintf("%d-%s", len(replace), filepath.Base(name)))
			if err := os.WriteFile(to, []byte(text), 0o600); err != nil {
				return "", err
			}
			replace[filepath.Join(root, name)] = to
		}
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	overlay := filepath.Join(dir, "overlay.json")
	return overlay, os.WriteFile(overlay, text, 0o600)
}
