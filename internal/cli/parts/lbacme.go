package parts

import (
	"net/url"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/lb/acme"
	lbcontroller "github.com/fairlead/fairlead/internal/lb/controller"
)

// acmeFlags say where certificates of load balancers are ordered, and who may have them.
type acmeFlags struct {
	directory, email, caFile string
	domains                  []string
}

func (f *acmeFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.directory, "lb-acme-directory", "",
		"directory of an authority that speaks ACME, as https://acme-v02.api.letsencrypt.org/directory: the controller of load balancers orders "+
			"the certificates there that Services ask for; its terms of service are accepted; empty for none")
	flags.StringVar(&f.email, "lb-acme-email", "", "address that the authority may write to")
	flags.StringArrayVar(&f.domains, "lb-acme-domain", nil,
		"domain that certificates are ordered for, with all below it: DOMAIN, or DOMAIN=NAMESPACE[,NAMESPACE] for some namespaces; "+
			"may be given several times")
	flags.StringVar(&f.caFile, "lb-acme-ca-file", "", "authorities of the certificate of that directory (default: the system's)")
}

func (f *acmeFlags) check() error {
	if f.directory == "" {
		return nil
	}
	if u, err := url.Parse(f.directory); err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil {
		return base.Usagef("--lb-acme-directory %.100q: it must be the https:// URL of a directory", f.directory)
	}
	if len(f.domains) == 0 {
		return base.Usagef("--lb-acme-directory needs --lb-acme-domain: which certificates may be ordered, and by whom")
	}
	_, err := f.allowed()
	return err
}

// allowed returns the domains.
func (f *acmeFlags) allowed() ([]acme.Domain, error) {
	var out []acme.Domain
	for _, text := range f.domains {
		name, list, some := strings.Cut(strings.ToLower(text), "=")
		d := acme.Domain{Name: name}
		if len(validation.IsDNS1123Subdomain(name)) > 0 {
			return nil, base.Usagef("--lb-acme-domain %.100q: %q is not a domain", text, name)
		}
		if some {
			d.Namespaces = strings.Split(list, ",")
		}
		for _, n := range d.Namespaces {
			if len(validation.IsDNS1123Label(n)) > 0 {
				return nil, base.Usagef("--lb-acme-domain %.100q: %q is not a namespace", text, n)
			}
		}
		out = append(out, d)
	}
	return out, nil
}

// options returns what certificates are ordered by, nil if none are.
func (f *acmeFlags) options() (*lbcontroller.ACME, error) {
	if f.directory == "" {
		return nil, nil
	}
	domains, err := f.allowed()
	if err != nil {
		return nil, err
	}
	roots, err := readRoots("lb-acme-ca-file", f.caFile)
	return &lbcontroller.ACME{Directory: f.directory, Email: f.email, Roots: roots, Domains: domains}, err
}
