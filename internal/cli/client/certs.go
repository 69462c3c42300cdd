package client

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/certs"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/apiserver/rotation"
	"github.com/fairlead/fairlead/internal/cli/base"
)

// NewCerts returns 'fairlead certs'.
func NewCerts(g *base.Global) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "certs",
		Short: "Show and renew certificates, and replace the cluster's authority and the key of tokens",
		Long: `Show the certificates of the server, of other servers and of nodes, renew those of the
server, and replace the authority that signs them all, while everything runs. Servers and
nodes renew their certificates by themselves.`,
		Example: `  fairlead certs status
  fairlead certs renew server
  fairlead certs rotate-ca
  fairlead certs rotate-ca --status
  fairlead certs rotate-ca --finish`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newCertsStatus(g), newCertsRenew(g), newRotateCA(g), newRotateTokenKey(g))
	return cmd
}

// certsReport is what 'fairlead certs status' shows. Its JSON form is meant for programs: fields are only ever added.
type certsReport struct {
	Certificates []certRow       `json:"certificates"`
	Rotation     rotation.Status `json:"rotation"`
}

type certRow struct {
	Holder  string `json:"holder"`
	Name    string `json:"name"`
	Subject string `json:"subject,omitempty"`
	// Issuer is "signs" where the authority that signs has signed it or is it, "goes" or "joins" for the other one
	// of a rotation, "trusted" for another one that is trusted, "other" for any other, and "unknown" where its holder does not report.
	Issuer string    `json:"issuer"`
	Ends   time.Time `json:"ends,omitzero"`
	Days   int       `json:"daysLeft"`
}

func newCertsStatus(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	var output base.OutputFlag
	var days int
	cmd := &cobra.Command{
		Use: "status", Short: "List the certificates of the server, the other servers and all nodes, with their ends",
		Long: `List the certificates of the server, the other servers and all nodes: holder, subject,
authority and end. On a node, or while no server runs, list the certificates in the data
directory of this machine.

The exit code is 1 if a certificate ends within --days.`,
		Example: `  fairlead certs status --days 20
  fairlead certs status -o json | jq '.certificates[] | select(.daysLeft < 20)'`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.Check(); err != nil {
				return err
			}
			r, err := certificates(cmd.Context(), &f, time.Now(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if err := output.Write(g.Out, r, r.print); err != nil {
				return err
			}
			return r.judge(days)
		},
	}
	f.Add(cmd)
	output.Add(cmd)
	cmd.Flags().IntVar(&days, "days", 14, "exit with 1 if a certificate ends within that many days")
	return cmd
}

// certificates asks the server, or reads the directory of this machine where none answers, with a
// line on warn.
func certificates(ctx context.Context, f *base.ClientFlags, now time.Time, warn io.Writer) (*certsReport, error) {
	client, _, err := f.Client()
	if err == nil {
		var s *certs.Status
		if s, err = certificatesOf(ctx, client); err == nil {
			return certRows(s, now), nil
		}
	}
	if base.IsAnswer(err) {
		return nil, err
	}
	for _, dir := range []string{"pki", "node-pki"} {
		authorities, leaves, localErr := pki.List(filepath.Join(f.DataDir, dir))
		if localErr == nil {
			fmt.Fprintf(warn, "no server was asked (%v): these are only the files of this machine\n", err)
			s := &certs.Status{Server: filepath.Join(f.DataDir, dir), Authorities: authorities, Certificates: leaves}
			return certRows(s, now), nil
		}
	}
	return nil, err
}

func certificatesOf(ctx context.Context, client kubernetes.Interface) (*certs.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, base.RequestTimeout)
	defer cancel()
	text, err := client.CoreV1().RESTClient().Get().AbsPath(certs.Path).DoRaw(ctx)
	if err != nil {
		return nil, err
	}
	var s certs.Status
	return &s, json.Unmarshal(text, &s)
}

func certRows(s *certs.Status, now time.Time) *certsReport {
	r := &certsReport{Rotation: s.Rotation}
	add := func(row certRow, issuer string) {
		row.Issuer, row.Days = issuerWord(s, issuer), int(row.Ends.Sub(now).Hours()/24)
		r.Certificates = append(r.Certificates, row)
	}
	for _, c := range slices.Concat(s.Authorities, s.Certificates) {
		add(certRow{Holder: s.Server, Name: c.Name, Subject: c.Subject, Ends: c.Ends}, c.Issuer)
	}
	for _, o := range s.Others {
		kind, _, _ := strings.Cut(o.Holder, " ")
		if len(o.Trusts) == 0 {
			r.Certificates = append(r.Certificates, certRow{Holder: o.Holder, Name: kind, Issuer: "unknown"})
			continue
		}
		add(certRow{Holder: o.Holder, Name: kind, Ends: o.Ends}, o.Issuer)
	}
	return r
}

// issuerWord returns the word for the state of an authority.
func issuerWord(s *certs.Status, hash string) string {
	i := slices.IndexFunc(s.Authorities, func(a pki.File) bool { return a.Issuer == hash })
	switch {
	case i == 0:
		return "signs"
	case i < 0:
		return "other"
	case s.Rotation.Step == rotation.Trust:
		return "joins"
	case s.Rotation.Step == rotation.Sign || s.Rotation.Step == rotation.Back:
		return "goes"
	}
	return "trusted"
}

func (r *certsReport) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 4, 3, ' ', 0)
	fmt.Fprintln(w, "HOLDER\tCERTIFICATE\tSUBJECT\tAUTHORITY\tENDS\tDAYS")
	for _, c := range r.Certificates {
		ends, days := "-", "-"
		if !c.Ends.IsZero() {
			ends, days = c.Ends.Local().Format(time.DateTime), fmt.Sprint(c.Days)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", base.PlainLine(c.Holder), c.Name, base.PlainLine(cmp.Or(c.Subject, "-")), c.Issuer, ends, days)
	}
	if err := w.Flush(); err != nil || r.Rotation.Step == "" || r.Rotation.Step == rotation.Done && len(r.Rotation.Waiting) == 0 {
		return err
	}
	fmt.Fprintln(out)
	return printRotation(out, r.Rotation)
}

// judge returns an error that names the certificates that end within days.
func (r *certsReport) judge(days int) error {
	var soon []string
	for _, c := range r.Certificates {
		if !c.Ends.IsZero() && c.Days < days {
			soon = append(soon, c.Holder+"'s "+c.Name)
		}
	}
	if len(soon) == 0 {
		return nil
	}
	return fmt.Errorf("%d certificates end within %d days: %s; see the logs of their holders for why they were not renewed",
		len(soon), days, strings.Join(soon, ", "))
}

func newCertsRenew(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	cmd := &cobra.Command{
		Use: "renew [NAME...]", Short: "Renew certificates of the server now",
		Long: `Renew certificates of the server now: all, or the given NAMEs of 'fairlead certs status'. The
server uses the new ones at once, and writes the kubeconfigs that have them. Nodes
renew theirs by themselves. Only users with all permissions may ask for it.`,
		Example: `  fairlead certs renew
  fairlead certs renew server admin`,
		RunE: func(cmd *cobra.Command, names []string) error {
			if err := askCertificates(cmd.Context(), &f, "renew", false, names...); err != nil {
				return err
			}
			_, err := fmt.Fprintf(g.Out, "renewed: %s\n", cmp.Or(strings.Join(names, ", "), "all of this server"))
			return err
		},
	}
	f.Add(cmd)
	return cmd
}

// askCertificates asks the server for something of certs.Path.
func askCertificates(ctx context.Context, f *base.ClientFlags, do string, force bool, names ...string) error {
	client, _, err := f.Client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, base.RequestTimeout)
	defer cancel()
	r := client.CoreV1().RESTClient().Post().AbsPath(certs.Path).Param("do", do)
	for _, name := range names {
		r = r.Param("name", name)
	}
	if force {
		r = r.Param("force", "true")
	}
	return r.Do(ctx).Error()
}

func newRotateCA(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	var status, finish, abort, force bool
	cmd := &cobra.Command{
		Use: "rotate-ca", Short: "Replace the cluster's certificate authority while everything runs",
		Long: `Replace the cluster's certificate authority while everything runs. A second authority is
made, and all servers and nodes trust both. When all have reported that, the new one signs,
and all renew their certificates by themselves. Then --finish removes the old one. It fails
while the old one is still in use, and names the users.

Before --finish, give the new kubeconfigs ('fairlead kubeconfig') to those who have old
ones, also to 'fairlead proxy', 'dns' and others with a kubeconfig, and restart programs in
Pods that read their ca.crt only once. After it, old kubeconfigs and join tokens are
rejected, and a node that was off joins again with a token.

An interrupted rotation continues when the servers are back. --abort goes back to the old
authority; if the new one has already signed, --finish then removes the new one. Of several
servers with embedded etcds all must run; the rotation names and awaits servers that are
down. At the end each restarts its etcd inside its process, one after another: requests
wait for about a second.`,
		Example: `  fairlead certs rotate-ca
  fairlead certs rotate-ca --status
  fairlead certs rotate-ca --finish`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			given := map[bool]int{}
			for _, b := range []bool{status, finish, abort} {
				given[b]++
			}
			if given[true] > 1 || status && force || abort && force {
				return base.Usagef("give one of --status, --finish and --abort; --force goes with --finish, or is given without the three")
			}
			do := "begin"
			switch {
			case finish:
				do = "finish"
			case abort:
				do = "abort"
			}
			if !status {
				if err := askCertificates(cmd.Context(), &f, do, force); err != nil {
					return err
				}
			}
			client, _, err := f.Client()
			if err != nil {
				return err
			}
			s, err := certificatesOf(cmd.Context(), client)
			if err != nil {
				return err
			}
			return printRotation(g.Out, s.Rotation)
		},
	}
	f.Add(cmd)
	flags := cmd.Flags()
	flags.BoolVar(&status, "status", false, "show how far the rotation is, and who is awaited; change nothing")
	flags.BoolVar(&finish, "finish", false, "remove the authority that no longer signs")
	flags.BoolVar(&abort, "abort", false, "go back to the old authority")
	flags.BoolVar(&force, "force", false,
		"do not wait for servers and nodes that have not reported: they must join again, or get new credentials")
	return cmd
}

func printRotation(out io.Writer, s rotation.Status) error {
	next := map[rotation.Step]string{
		"":             "no rotation of the authority is under way",
		rotation.Done:  "no rotation of the authority is under way; the last one is done",
		rotation.Trust: "both authorities are trusted; the new one signs when all servers and nodes have reported that they trust both",
		rotation.Sign:  "the new authority signs; when nothing of the old one is in use: fairlead certs rotate-ca --finish",
		rotation.Back:  "aborted: the old authority signs; when nothing of the new one is in use: fairlead certs rotate-ca --finish",
	}
	fmt.Fprintln(out, cmp.Or(next[s.Step], "the rotation is at the step "+string(s.Step)))
	for _, w := range s.Waiting {
		fmt.Fprintln(out, "!", base.PlainLine(w))
	}
	return nil
}
