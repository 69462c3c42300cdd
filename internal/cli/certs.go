package cli

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

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/apiserver/rotation"
)

func newCerts(g *global) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "certs",
		Short: "Show and renew certificates, and replace the cluster's authority",
		Long: `Show the certificates of the server, of other servers and of nodes, renew those of the
server, and replace the authority that signs them all, while everything runs. Servers and
nodes renew their certificates by themselves.`,
		Example: `  fairlead certs status
  fairlead certs renew server
  fairlead certs rotate-ca
  fairlead certs rotate-ca --status
  fairlead certs rotate-ca --finish`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newCertsStatus(g), newCertsRenew(g), newRotateCA(g))
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

func newCertsStatus(g *global) *cobra.Command {
	var f clientFlags
	var output outputFlag
	var days int
	cmd := &cobra.Command{
		Use: "status", Short: "List the certificates of the server, the other servers and all nodes, with their ends",
		Long: `List the certificates of the server, the other servers and all nodes: who holds it, for whom
it is, by which authority, and when it ends. On a node, or while no server runs, those
in the data directory of this machine.

The exit code is 1 if a certificate ends within --days.`,
		Example: `  fairlead certs status --days 20
  fairlead certs status -o json | jq '.certificates[] | select(.daysLeft < 20)'`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.check(); err != nil {
				return err
			}
			r, err := f.certificates(cmd.Context(), time.Now(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if err := output.write(g.out, r, r.print); err != nil {
				return err
			}
			return r.judge(days)
		},
	}
	f.add(cmd)
	output.add(cmd)
	cmd.Flags().IntVar(&days, "days", 14, "exit with 1 if a certificate ends within that many days")
	return cmd
}

// certificates asks the server, or reads the directory of this machine where none answers, with a
// line on warn.
func (f *clientFlags) certificates(ctx context.Context, now time.Time, warn io.Writer) (*certsReport, error) {
	client, _, err := f.client()
	if err == nil {
		var s *apiserver.CertificatesStatus
		if s, err = certificatesOf(ctx, client); err == nil {
			return certRows(s, now), nil
		}
	}
	if isAnswer(err) {
		return nil, err
	}
	for _, dir := range []string{"pki", "node-pki"} {
		authorities, leaves, localErr := pki.List(filepath.Join(f.dataDir, dir))
		if localErr == nil {
			fmt.Fprintf(warn, "no server was asked (%v): these are the files of this machine alone\n", err)
			s := &apiserver.CertificatesStatus{Server: filepath.Join(f.dataDir, dir), Authorities: authorities, Certificates: leaves}
			return certRows(s, now), nil
		}
	}
	return nil, err
}

func certificatesOf(ctx context.Context, client kubernetes.Interface) (*apiserver.CertificatesStatus, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	text, err := client.CoreV1().RESTClient().Get().AbsPath(apiserver.CertificatesPath).DoRaw(ctx)
	if err != nil {
		return nil, err
	}
	var s apiserver.CertificatesStatus
	return &s, json.Unmarshal(text, &s)
}

func certRows(s *apiserver.CertificatesStatus, now time.Time) *certsReport {
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

// issuerWord says what an authority is at this moment.
func issuerWord(s *apiserver.CertificatesStatus, hash string) string {
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
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", plainLine(c.Holder), c.Name, plainLine(cmp.Or(c.Subject, "-")), c.Issuer, ends, days)
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
	return fmt.Errorf("%d certificates end within %d days: %s; see the logs of those who hold them for why they were not renewed",
		len(soon), days, strings.Join(soon, ", "))
}

func newCertsRenew(g *global) *cobra.Command {
	var f clientFlags
	cmd := &cobra.Command{
		Use: "renew [NAME...]", Short: "Renew certificates of the server now",
		Long: `Renew certificates of the server now, all or those of these names ('fairlead certs status'). The
server goes on with the new ones at once, and writes the kubeconfigs that have them. Nodes
renew theirs by themselves. Only users who may do everything may ask for it.`,
		Example: `  fairlead certs renew
  fairlead certs renew server admin`,
		RunE: func(cmd *cobra.Command, names []string) error {
			if err := f.askCertificates(cmd.Context(), "renew", false, names...); err != nil {
				return err
			}
			_, err := fmt.Fprintf(g.out, "renewed: %s\n", cmp.Or(strings.Join(names, ", "), "all of this server"))
			return err
		},
	}
	f.add(cmd)
	return cmd
}

// askCertificates asks the server for something of apiserver.CertificatesPath.
func (f *clientFlags) askCertificates(ctx context.Context, do string, force bool, names ...string) error {
	client, _, err := f.client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	r := client.CoreV1().RESTClient().Post().AbsPath(apiserver.CertificatesPath).Param("do", do)
	for _, name := range names {
		r = r.Param("name", name)
	}
	if force {
		r = r.Param("force", "true")
	}
	return r.Do(ctx).Error()
}

func newRotateCA(g *global) *cobra.Command {
	var f clientFlags
	var status, finish, abort, force bool
	cmd := &cobra.Command{
		Use: "rotate-ca", Short: "Replace the cluster's certificate authority while everything runs",
		Long: `Replace the cluster's certificate authority while everything runs. A second authority is made,
and everybody trusts both; when all servers and nodes have reported that, the new one
signs, and all renew their certificates by themselves. Then --finish removes the old one: it
fails while it is still in use, and names the users.

Before --finish, give the new kubeconfigs ('fairlead kubeconfig') to those who have old
ones, also to 'fairlead proxy', 'dns' and others with a kubeconfig, and restart programs in
Pods that read their ca.crt only once. After it, old kubeconfigs and join tokens are
rejected, and a node that was off joins again with a token.

A rotation that is interrupted goes on when the servers are back. --abort goes back to the
old authority; where the new one has signed already, when --finish is called. Of several
servers with embedded etcds all must run: those that are down are named and awaited. At the
end each restarts its etcd, which reads the authorities of others once, one after another
within its process: requests wait for about a second.`,
		Example: `  fairlead certs rotate-ca
  fairlead certs rotate-ca --status
  fairlead certs rotate-ca --finish`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			given := map[bool]int{}
			for _, b := range []bool{status, finish, abort} {
				given[b]++
			}
			if given[true] > 1 || status && force || abort && force {
				return usagef("give one of --status, --finish and --abort; --force goes with --finish, or alone")
			}
			do := "begin"
			switch {
			case finish:
				do = "finish"
			case abort:
				do = "abort"
			}
			if !status {
				if err := f.askCertificates(cmd.Context(), do, force); err != nil {
					return err
				}
			}
			client, _, err := f.client()
			if err != nil {
				return err
			}
			s, err := certificatesOf(cmd.Context(), client)
			if err != nil {
				return err
			}
			return printRotation(g.out, s.Rotation)
		},
	}
	f.add(cmd)
	flags := cmd.Flags()
	flags.BoolVar(&status, "status", false, "show how far the rotation is, and who is awaited; change nothing")
	flags.BoolVar(&finish, "finish", false, "remove the authority that no longer signs")
	flags.BoolVar(&abort, "abort", false, "go back to the old authority")
	flags.BoolVar(&force, "force", false, "do not wait for those that have not reported: they have to join again, or get new credentials")
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
		fmt.Fprintln(out, "!", plainLine(w))
	}
	return nil
}
