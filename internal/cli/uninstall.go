package cli

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

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/runner"
	"github.com/fairlead/fairlead/internal/systemd"
)

// Bounds of the parts of an uninstallation.
const (
	uninstallAsk     = 30 * time.Second
	uninstallPackage = 2 * time.Minute
)

// units are those of the packages.
func units() []string { return []string{"fairlead-agent.service", "fairlead-server.service"} }

type uninstall struct {
	*global
	yes, keepData, force bool
	dataDirs             []string
}

func newUninstall(g *global) *cobra.Command {
	u := &uninstall{global: g}
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove fairlead from this machine: units, Pods, rules, data, configuration, package",
		Long: `Remove fairlead from this machine. Its units are stopped, its Pods end, what it wrote
to the kernel is removed as by 'fairlead cleanup', with the hooks of 'fairlead register
--install-hook', then the data directories (the
server's objects and keys with them), ` + systemConfigDir + ` and the package that this program came
with. A program that no package brought stays; its path is printed.

It asks first, and does not remove a server to which other machines are joined, unless
it is given --force. A copy of the server's data is made by 'fairlead backup FILE'.
An agent or server that was not started by its unit has to be stopped before.`,
		Example: `  fairlead uninstall
  fairlead uninstall --yes --keep-data`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return u.run(cmd) },
	}
	flags := cmd.Flags()
	flags.BoolVar(&u.yes, "yes", false, "do not ask")
	flags.BoolVar(&u.keepData, "keep-data", false, "keep "+systemConfigDir+", the server's data and the node's certificate")
	flags.BoolVar(&u.force, "force", false, "remove a server to which other machines are joined, or that does not answer")
	flags.StringSliceVar(&u.dataDirs, "data-dir", nil,
		"data directories (default "+systemDataDir+", and those in "+systemConfigFile+")")
	return cmd
}

func (u *uninstall) run(cmd *cobra.Command) error {
	if os.Geteuid() != 0 || mappedRoot() {
		return errors.New("uninstalling changes this machine and needs root: run it with sudo; " +
			"what 'fairlead up' of a user left, 'fairlead cleanup' removes without root")
	}
	ctx := cmd.Context()
	log, err := u.logger()
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
		fmt.Fprintf(u.out, "left on the server: the Node of this machine; there, run 'kubectl delete node %s'\n", n)
	}
	return u.removeProgram(ctx)
}

// findDataDirs adds those of the configuration to the default, unless some were named, which
// must be fairlead's.
func (u *uninstall) findDataDirs() error {
	for _, dir := range u.dataDirs {
		if !isDataDir(dir) {
			return usagef("--data-dir %s: there is nothing of a server or an agent in it; nothing was removed", dir)
		}
	}
	if len(u.dataDirs) > 0 {
		return nil
	}
	u.dataDirs = []string{systemDataDir}
	c, err := readConfig(systemConfigFile, false)
	if err != nil {
		return fmt.Errorf("%w; name the data directories by --data-dir", err)
	}
	for _, s := range c.settings {
		if s.flag == "data-dir" && !slices.Contains(u.dataDirs, s.value.Value) {
			u.dataDirs = append(u.dataDirs, s.value.Value)
		}
	}
	return nil
}

// isDataDir reports whether a directory has what a server or an agent keeps in its data directory.
func isDataDir(dir string) bool {
	if apiserver.HasData(dir) || runner.IsState(nodeState(dir)) {
		return true
	}
	for _, file := range []string{nodePKI(dir), filepath.Join(dir, clusterRecord), filepath.Join(dir, serversRecord)} {
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
		a, err := readRecord(dir)
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

// checkNodes rejects the end of a server that is one of several, or that has other nodes than
// those of this machine.
func (u *uninstall) checkNodes(ctx context.Context, here []string) error {
	ctx, cancel := context.WithTimeout(ctx, uninstallAsk)
	defer cancel()
	for _, dir := range u.dataDirs {
		if !apiserver.HasData(dir) {
			continue
		}
		// Without an answer, that to the question for the Nodes decides.
		if members, err := apiserver.LocalMembers(ctx, dir); err == nil && len(members) > 1 {
			return fmt.Errorf("the server in %s is one of %d, which would go on counting it for their quorum; on another one run "+
				"'fairlead server remove NAME' first ('fairlead server members' has the names), then uninstall with --force", dir, len(members))
		}
		f := clientFlags{kubeconfig: filepath.Join(dir, adminKubeconfig)}
		client, _, err := f.client()
		if err != nil {
			return err
		}
		list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return fmt.Errorf("cannot find out which machines are joined to the server in %s: %w; "+
				"start it, or give --force to remove it nevertheless", dir, err)
		}
		var others []string
		for i := range list.Items {
			if name := list.Items[i].Name; name != hostname() && !slices.Contains(here, name) {
				others = append(others, name)
			}
		}
		if len(others) > 0 {
			shown := strings.Join(others[:min(len(others), 5)], ", ")
			return fmt.Errorf("other machines are joined to the server in %s: %d, among them %s; uninstall those first and run "+
				"'kubectl delete node NAME', or give --force to remove the server nevertheless", dir, len(others), shown)
		}
	}
	return nil
}

// ask returns an error unless the user confirms.
func (u *uninstall) ask() error {
	fmt.Fprintf(u.out, "This stops and disables %s, ends the Pods of this machine, and removes fairlead's rules\n"+
		"from its kernel, the hooks of registered units and fairlead's package", strings.Join(units(), " and "))
	if !u.keepData {
		fmt.Fprintf(u.out, ", and for ever %s,\nthe units' files and additions in /etc/systemd/system, and what fairlead keeps in %s",
			systemConfigDir, strings.Join(u.dataDirs, ", "))
	}
	fmt.Fprint(u.out, ".\nType yes to go on: ")
	answer, _ := bufio.NewReader(u.in).ReadString('\n')
	if strings.TrimSpace(answer) != "yes" {
		return errors.New("nothing was removed: not confirmed; --yes does not ask")
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
	fmt.Fprintln(u.out, "removed: pods and their network, proxy rules, kernel parameters")
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
	if err := os.RemoveAll(systemConfigDir); err != nil {
		return err
	}
	fmt.Fprintln(u.out, "removed: "+systemConfigDir)
	return nil
}

// removeData removes what a server and a node keep in a directory, and the directory if
// it has nothing else.
func (u *uninstall) removeData(dir string) error {
	errs := []error{apiserver.RemoveData(dir), os.RemoveAll(nodePKI(dir))}
	for _, file := range []string{clusterRecord, serversRecord} {
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
		fmt.Fprintf(u.out, "left: %s, with %s, which is not fairlead's\n", dir, entries[0].Name())
		return nil
	}
	if err := os.Remove(dir); err != nil {
		return fmt.Errorf("%w; it is empty", err) // a mount point
	}
	fmt.Fprintln(u.out, "removed: "+dir)
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
		fmt.Fprintln(u.out, "removed: the package "+packageName)
		return keepConfig()
	}
	fmt.Fprintf(u.out, "left: %s, which no package brought\n", program)
	return nil
}

// keepConfig gives the configuration its name back: rpm removes the file, or saves one
// that differs from the package's under another name.
func keepConfig() error {
	if _, err := os.Stat(systemConfigFile); err == nil {
		return nil
	}
	if err := os.Rename(systemConfigFile+".rpmsave", systemConfigFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// packageName is that of deploy/nfpm.yaml.
const packageName = "fairlead"
