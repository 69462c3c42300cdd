package parts

import (
	"encoding/base64"
	"fmt"
	"io"
	"net/url"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/lb/acme"
	"github.com/fairlead/fairlead/internal/lb/acme/nsupdate"
	lbcontroller "github.com/fairlead/fairlead/internal/lb/controller"
)

// acmeFlags say where certificates of load balancers are ordered, and who may have them.
type acmeFlags struct {
	directory, email, caFile string
	domains                  []string
	limits                   string
	bindingID, bindingFile   string
	zones                    []string
	zoneKeyFile              string
}

func (f *acmeFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.directory, "lb-acme-directory", "",
		"directory of an authority that speaks ACME, as https://acme-v02.api.letsencrypt.org/directory: the controller of load balancers orders "+
			"the certificates there that Services ask for; its terms of service are accepted; empty for none")
	flags.StringVar(&f.email, "lb-acme-email", "", "address that the authority may write to")
	flags.StringArrayVar(&f.domains, "lb-acme-domain", nil,
		"domain that certificates are ordered for, with all below it: DOMAIN, or DOMAIN=NAMESPACE[,NAMESPACE] for some namespaces; "+
			"may be given several times")
	flags.StringVar(&f.bindingID, "lb-acme-eab-key-id", "",
		"key that the account is bound to at an authority that wants external account binding; its HMAC key is in --lb-acme-eab-key-file")
	flags.StringVar(&f.bindingFile, "lb-acme-eab-key-file", "", "file with that HMAC key in base64url, which nobody else may read (mode 0600)")
	flags.StringArrayVar(&f.zones, "lb-acme-dns-zone", nil,
		"zone that names are verified in by DNS-01, and its own servers: ZONE=SERVER[:PORT][,SERVER...]; the first one is updated (RFC 2136); "+
			"may be given several times")
	flags.StringVar(&f.zoneKeyFile, "lb-acme-dns-key-file", "",
		"file with the key of these updates as tsig-keygen writes it, which nobody else may read (mode 0600)")
	flags.StringVar(&f.limits, "lb-acme-limits", "",
		"what all namespaces together may ask of that authority: orders=250 in 3 hours, domain-orders=45 certificates below a registered domain "+
			"in 7 days, failures=60 orders that fail in an hour, host-failures=4 of one name in an hour; with commas between; 0 for no limit")
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
	if _, err := f.allowed(); err != nil {
		return err
	}
	if (f.bindingID == "") != (f.bindingFile == "") {
		return base.Usagef("--lb-acme-eab-key-id and --lb-acme-eab-key-file need each other")
	}
	if _, err := f.updated(); err != nil {
		return err
	}
	_, err := f.bounds()
	return err
}

// updated returns the zones of DNS-01.
func (f *acmeFlags) updated() (zones []nsupdate.Zone, err error) {
	if (len(f.zones) == 0) != (f.zoneKeyFile == "") {
		return nil, base.Usagef("--lb-acme-dns-zone and --lb-acme-dns-key-file need each other")
	}
	for _, text := range f.zones {
		z, err := nsupdate.ParseZone(text)
		if err != nil {
			return nil, base.Usagef("--lb-acme-dns-zone %.100q: %v", text, err)
		}
		zones = append(zones, z)
	}
	return zones, nil
}

// updater returns what updates the zones, nil without one.
func (f *acmeFlags) updater() (*nsupdate.Updater, error) {
	zones, err := f.updated()
	if err != nil || len(zones) == 0 {
		return nil, err
	}
	text, err := readPrivate("lb-acme-dns-key-file", f.zoneKeyFile)
	if err != nil {
		return nil, err
	}
	key, err := nsupdate.ParseKey(text)
	if err != nil {
		return nil, fmt.Errorf("--lb-acme-dns-key-file %s: %w", f.zoneKeyFile, err)
	}
	return nsupdate.New(zones, key), nil
}

// binding reads the HMAC key of an external account binding.
func (f *acmeFlags) binding() (acme.Binding, error) {
	if f.bindingFile == "" {
		return acme.Binding{}, nil
	}
	text, err := readPrivate("lb-acme-eab-key-file", f.bindingFile)
	if err != nil {
		return acme.Binding{}, err
	}
	text = strings.TrimRight(strings.NewReplacer("+", "-", "/", "_").Replace(text), "=")
	key, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil || len(key) < 16 {
		return acme.Binding{}, fmt.Errorf("--lb-acme-eab-key-file %s has no key of 16 bytes or more in base64url", f.bindingFile)
	}
	return acme.Binding{KeyID: f.bindingID, Key: key}, nil
}

// maxPrivate bounds a file with a key.
const maxPrivate = 64 << 10

// readPrivate reads the file of a flag that nobody but its owner may read, without the space around its text. An error has no
// part of it.
func readPrivate(flag, path string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("--%s: %w", flag, err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return "", fmt.Errorf("--%s: %w", flag, err)
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return "", fmt.Errorf("--%s %s: others may read it (mode %04o); chmod 600", flag, path, mode)
	}
	text, err := io.ReadAll(io.LimitReader(file, maxPrivate))
	if err != nil {
		return "", fmt.Errorf("--%s: %w", flag, err)
	}
	return strings.TrimSpace(string(text)), nil
}

// bounds returns the limits.
func (f *acmeFlags) bounds() (acme.Limits, error) {
	out := acme.DefaultLimits()
	if f.limits == "" {
		return out, nil
	}
	of := map[string]*int{
		"orders": &out.Orders, "domain-orders": &out.DomainOrders, "failures": &out.Failures, "host-failures": &out.HostFailures,
	}
	for item := range strings.SplitSeq(f.limits, ",") {
		name, text, _ := strings.Cut(item, "=")
		n, err := strconv.ParseUint(text, 10, 20)
		if of[name] == nil || err != nil {
			return out, base.Usagef("--lb-acme-limits: %.100q is not LIMIT=NUMBER; the limits are orders, domain-orders, failures and host-failures",
				item)
		}
		*of[name] = int(n)
	}
	return out, nil
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
	limits, err := f.bounds()
	if err != nil {
		return nil, err
	}
	binding, err := f.binding()
	if err != nil {
		return nil, err
	}
	updater, err := f.updater()
	if err != nil {
		return nil, err
	}
	roots, err := readRoots("lb-acme-ca-file", f.caFile)
	return &lbcontroller.ACME{
		Directory: f.directory, Email: f.email, Roots: roots, Domains: domains, Limits: limits, Binding: binding, DNS: updater,
	}, err
}
