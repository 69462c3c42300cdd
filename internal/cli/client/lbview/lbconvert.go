package lbview

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/lb/kubevip"
	"github.com/fairlead/fairlead/internal/lb/metallb"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// NewConvert returns 'fairlead lb convert'.
func NewConvert(g *base.Global) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "convert -f FILE",
		Short: "Convert the configuration of MetalLB or kube-vip into that of fairlead lb",
		Long: `Convert objects of metallb.io, or the ConfigMap of kube-vip's cloud provider, into objects
of fairlead.dev, and print these as YAML. No cluster is needed. What cannot be kept is
an error with the path of the field, and then nothing is printed: docs/loadbalancer.md
lists all fields. Notes on what else you have to do go to the standard error.`,
		Example: `  kubectl get -n metallb-system -o yaml \
    ipaddresspools.metallb.io,l2advertisements,bgpadvertisements,bgppeers.metallb.io,communities,bfdprofiles > metallb.yaml
  fairlead lb convert -f metallb.yaml | kubectl apply -f -
  kubectl get -n kube-system configmap kubevip -o yaml | fairlead lb convert -f - | kubectl apply -f -`,
		Args: base.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if file == "" {
				return base.Usagef("fairlead lb convert needs -f FILE; - is the standard input")
			}
			return convert(g, file)
		},
	}
	cmd.Flags().StringVarP(&file, "filename", "f", "",
		`file with objects of metallb.io, or a ConfigMap of kube-vip, as YAML or JSON; "-" is the standard input`)
	return cmd
}

// convert prints what the objects of a file mean to fairlead, and notes on the standard error.
func convert(g *base.Global, file string) error {
	in := g.In
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return err
		}
		defer f.Close()
		in = f
	}
	r, err := converted(in)
	if refused := refusals(err); len(refused) > 0 {
		for _, text := range refused {
			fmt.Fprintln(g.Err, base.PlainLine(text))
		}
		return fmt.Errorf("cannot convert %s: %d fields cannot be kept, or are wrong", file, len(refused))
	}
	if err != nil {
		return fmt.Errorf("cannot convert %s: %w", file, err)
	}
	text, err := manifest(r)
	if err != nil {
		return err
	}
	for _, n := range r.Notes {
		fmt.Fprintln(g.Err, base.PlainLine("note: "+n))
	}
	_, err = g.Out.Write(text)
	return err
}

// converted converts the configuration of MetalLB or kube-vip.
func converted(in io.Reader) (*metallb.Result, error) {
	text, err := io.ReadAll(io.LimitReader(in, metallb.MaxText+1))
	if err != nil {
		return nil, err
	}
	if !kubevip.Is(text) {
		return metallb.Convert(bytes.NewReader(text))
	}
	r, err := kubevip.Convert(text)
	if err != nil {
		return nil, err
	}
	return &metallb.Result{Pools: r.Pools, Notes: r.Notes}, nil
}

// refusals returns the fields that an error of converted names.
func refusals(err error) []string {
	var ofMetalLB metallb.Refusals
	var ofKubeVIP kubevip.Refusals
	switch {
	case errors.As(err, &ofMetalLB):
		return ofMetalLB
	case errors.As(err, &ofKubeVIP):
		return ofKubeVIP
	}
	return nil
}

// manifest returns a result as documents of YAML.
func manifest(r *metallb.Result) ([]byte, error) {
	var objects []any
	for _, name := range slices.Sorted(maps.Keys(r.Passwords)) {
		objects = append(objects, &corev1.Secret{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"},
			ObjectMeta: metav1.ObjectMeta{Namespace: svc.SystemNamespace, Name: name},
			StringData: map[string]string{v1.PasswordKey: r.Passwords[name]},
		})
	}
	for _, p := range r.Peers {
		p.TypeMeta = metav1.TypeMeta{APIVersion: v1.GroupVersion.String(), Kind: "BGPPeer"}
		objects = append(objects, p)
	}
	for _, p := range r.Pools {
		p.TypeMeta = metav1.TypeMeta{APIVersion: v1.GroupVersion.String(), Kind: "IPAddressPool"}
		objects = append(objects, p)
	}
	var text []byte
	if r.Announce != "" {
		text = []byte("# For nodes with --lb-announce=" + r.Announce + "\n")
	}
	for i, o := range objects {
		document, err := written(o)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			text = append(text, "---\n"...)
		}
		text = append(text, document...)
	}
	return text, nil
}

// written returns an object as YAML without what the API server writes.
func written(o any) ([]byte, error) {
	text, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	var fields map[string]any
	if err := decoder.Decode(&fields); err != nil {
		return nil, err
	}
	delete(fields, "status")
	if meta, ok := fields["metadata"].(map[string]any); ok {
		delete(meta, "creationTimestamp")
	}
	return yaml.Marshal(fields)
}
