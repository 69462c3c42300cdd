package host

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/apiserver/store"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/config"
	"github.com/fairlead/fairlead/internal/runner"
	"github.com/fairlead/fairlead/internal/systemd"
)

// Bounds of the parts of an uninstallation.
const (
	uninstallAsk     = 30 * time.Second
	uninstallPackage = 2 * time.Minute
)

// units are the units of the packages.
func units() []string { return []string{"fairlead-agent.service", "fairlead-server.service"} }

type uninstall struct {
	*base.Global
	yes, keepData, force bool
	dataDirs             []string
}

// NewUninstall returns 'fairlead uninstall'.
func NewUninstall(g *base.Global) *cobra.Command {
	u := &uninstall{Global: g}
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove fairlead from this machine: units, Pods, rules, data, configuration, package",
		Long: `Remove fairlead from this machine: stop its units, end its Pods, remove its changes to the
kernel as 'fairlead cleanup' does and the hooks of 'fairlead register --install-hook', then
remove the data directories (with the server's objects and keys), ` + base.SystemConfigDir + ` and the package that this program came
with. A program that is not from a package stays; its path is printed.

It asks first. It only removes a server to which other machines are joined with --force.
'fairlead backup FILE' makes a copy of the server's data. Stop an agent or server that its
unit did not start before you run this.`,
		Example: `  fairlead uninstall
  fairlead uninstall --yes --keep-data`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return u.run(cmd) },
	}
	flags := cmd.Flags()
	flags.BoolVar(&u.yes, "yes", false, "do not ask")
	flags.BoolVar(&u.keepData, "keep-data", false, "keep "+base.SystemConfigDir+", the server's data and the node's certificate")
	flags.BoolVar(&u.force, "force", false, "remove a server to which other machines are joined, or that does not answer")
	flags.StringSliceVar(&u.dataDirs, "data-dir", nil,
		"data directories (default "+base.SystemDataDir+", and the ones in "+base.SystemConfigFile+")")
	return cmd
}

func (u *uninstall) run(cmd *cobra.Command) error {
	if os.Geteuid() != 0 || base.MappedRoot() {
		return errors.New("uninstalling changes this machine and needs root: run it with sudo; " +
			"what 'fairlead up' of a user left, 'fairlead cleanup' removes without root")
	}
	ctx := cmd.Context()
	log, err := u.Logger()
	if err != nil {
		return err
	}
	if err := u.findDataDirs(); err != nil {
		return err
	}
	nodes, err := u.nodesHere()
	if err != nil {
		return err
	}
	if !u.force {
		if err := u.checkNodes(ctx, nodes); err != nil {
			return err
		}
	}
	if !u.yes {
		if err := u.ask(); err != nil {
			return err
		}
	}
	if err := systemd.Disable(ctx, units()...); err != nil {
		return fmt.Errorf("nothing was removed: %w", err)
	}
	if err := u.remove(ctx, log); err != nil {
		return err
	}
	for _, n := range nodes {
		fmt.Fprintf(u.Out, "left on the server: the Node of this machine; there, run 'kubectl delete node %s'\n", n)
	}
	return u.removeProgram(ctx)
}

// findDataDirs adds the directories of the configuration to the default, unless some were named, which
// must be fairlead's.
func (u *uninstall) findDataDirs() error {
	for _, dir := range u.dataDirs {
		if !isDataDir(dir) {
			return base.Usagef("--data-dir %s has no data of a server or an agent; nothing was removed", dir)
		}
	}
	if len(u.dataDirs) > 0 {
		return nil
	}
	u.dataDirs = []string{base.SystemDataDir}
	c, err := config.Read(base.SystemConfigFile, false)
	if err != nil {
		return fmt.Errorf("%w; name the data directories with --data-dir", err)
	}
	for _, dir := range c.Values("data-dir") {
		if !slices.Contains(u.dataDirs, dir) {
			u.dataDirs = append(u.dataDirs, dir)
		}
	}
	return nil
}

// isDataDir reports whether a directory has what a server or an agent keeps in its data directory.
func isDataDir(dir string) bool {
	if store.HasData(dir) || runner.IsState(base.NodeState(dir)) {
		return true
	}
	for _, file := range []string{base.NodePKI(dir), filepath.Join(dir, base.ClusterRecord), filepath.Join(dir, base.ServersRecord)} {
		if _, err := os.Stat(file); err == nil {
			return true
		}
	}
	return false
}

// nodesHere returns the names that this machine has as a node of servers elsewhere, and of
// one here.
func (u *uninstall) nodesHere() (names []string, err error) {
	for _, dir := range u.dataDirs {
		a, err := base.ReadRecord(dir)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return nil, err
		default:
			names = append(names, a.Node)
		}
	}
	return names, nil
}

// checkNodes rejects the end of a server that is one of several, or that has nodes on other
// machines.
func (u *uninstall) checkNodes(ctx context.Context, here []string) error {
	ctx, cancel := context.WithTimeout(ctx, uninstallAsk)
	defer cancel()
	for _, dir := range u.dataDirs {
		if !store.HasData(dir) {
			continue
		}
		// Without an answer, that to the question for the Nodes decides.
		if members, err := store.LocalMembers(ctx, dir); err == nil && len(members) > 1 {
			return fmt.Errorf("the server in %s is one of %d, which would still count it for their quorum; on another one run "+
				"'fairlead server remove NAME' first ('fairlead server members' has the names), then uninstall with --force", dir, len(members))
		}
		f := base.ClientFlags{Kubeconfig: filepath.Join(dir, base.AdminKubeconfig)}
		client, _, err := f.Client()
		if err != nil {
			return err
		}
		list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return fmt.Errorf("cannot list the machines that are joined to the server in %s: %w; "+
				"start it, or give --force to remove it anyway", dir, err)
		}
		var others []string
		for i := range list.Items {
			if name := list.Items[i].Name; name != base.Hostname() && !slices.Contains(here, name) {
				others = append(others, name)
			}
		}
		if len(others) > 0 {
			shown := strings.Join(others[:min(len(others), 5)], ", ")
			return fmt.Errorf("other machines are joined to the server in %s: %d, among them %s; uninstall those first and run "+
				"'kubectl delete node NAME', or give --force to remove the server anyway", dir, len(others), shown)
		}
	}
	return nil
}

// ask returns an error unless the user confirms.
func (u *uninstall) ask() error {
	fmt.Fprintf(u.Out, "This stops and disables %s, ends the Pods of this machine, and removes fairlead's rules\n"+
		"from its kernel, the hooks of registered units and fairlead's package", strings.Join(units(), " and "))
	if !u.keepData {
		fmt.Fprintf(u.Out, ", and forever %s,\nthe units' files and additions in /etc/systemd/system, and what fairlead keeps in %s",
			base.SystemConfigDir, strings.Join(u.dataDirs, ", "))
	}
	fmt.Fprint(u.Out, ".\nType yes to continue: ")
	answer, _ := bufio.NewReader(u.In).ReadString('\n')
	if strings.TrimSpace(answer) != "yes" {
		return errors.New("nothing was removed: not confirmed; --yes skips the question")
	}
	return nil
}

// remove removes everything but the program.
func (u *uninstall) remove(ctx context.Context, log *slog.Logger) error {
	ctx, cancel := context.WithTimeout(ctx, cleanupTimeout)
	defer cancel()
	if err := systemd.RemoveHooks(ctx); err != nil {
		return fmt.Errorf("hooks of registered units: %w", err)
	}
	for _, dir := range u.dataDirs {
		if err := cleanUp(ctx, log, dir); err != nil {
			return err
		}
	}
	fmt.Fprintln(u.Out, "removed: pods and their network, proxy rules, kernel parameters")
	if u.keepData {
		return nil
	}
	for _, dir := range u.dataDirs {
		if err := u.removeData(dir); err != nil {
			return err
		}
	}
	// With the additions of 'systemctl edit', and the units that no package brought.
	for _, unit := range units() {
		for _, path := range []string{unit, unit + ".d"} {
			if err := os.RemoveAll(filepath.Join("/etc/systemd/system", path)); err != nil {
				return err
			}
		}
	}
	if err := os.RemoveAll(base.SystemConfigDir); err != nil {
		return err
	}
	fmt.Fprintln(u.Out, "removed: "+base.SystemConfigDir)
	return nil
}

// removeData removes what a server and a node keep in a directory, and the directory if
// it has nothing else.
func (u *uninstall) removeData(dir string) error {
	errs := []error{store.RemoveData(dir), os.RemoveAll(base.NodePKI(dir))}
	for _, file := range []string{base.ClusterRecord, base.ServersRecord} {
		errs = append(errs, os.RemoveAll(filepath.Join(dir, file)))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case len(entries) > 0:
		fmt.Fprintf(u.Out, "left: %s, with %s, which does not belong to fairlead\n", dir, entries[0].Name())
		return nil
	}
	if err := os.Remove(dir); err != nil {
		return fmt.Errorf("%w; it is empty", err) // a mount point
	}
	fmt.Fprintln(u.Out, "removed: "+dir)
	return nil
}

// removeProgram has the package manager remove the package of this program.
func (u *uninstall) removeProgram(ctx context.Context) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, uninstallPackage)
	defer cancel()
	purge := []string{"dpkg", "--purge"}
	if u.keepData {
		purge[1] = "--remove"
	}
	for _, manager := range []struct{ owns, remove []string }{
		{[]string{"dpkg", "-S", program}, purge},
		{[]string{"rpm", "-qf", program}, []string{"rpm", "-e"}},
	} {
		if exec.CommandContext(ctx, manager.owns[0], manager.owns[1:]...).Run() != nil {
			continue // it knows no such file, or is not here
		}
		remove := append(manager.remove, packageName)
		out, err := exec.CommandContext(ctx, remove[0], remove[1:]...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("remove the package: %w: %s; run '%s'", err, strings.TrimSpace(string(out)), strings.Join(remove, " "))
		}
		fmt.Fprintln(u.Out, "removed: the package "+packageName)
		return keepConfig()
	}
	fmt.Fprintf(u.Out, "left: %s, which is not from a package\n", program)
	return nil
}

// keepConfig gives the configuration its name back: rpm removes the file, or saves one
// that differs from the package's under another name.
func keepConfig() error {
	if _, err := os.Stat(base.SystemConfigFile); err == nil {
		return nil
	}
	if err := os.Rename(base.SystemConfigFile+".rpmsave", base.SystemConfigFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// packageName is that of deploy/nfpm.yaml.
const packageName = "fairlead"
