"""Wrong answers to lab 05, each with words that its verdict must hold. Most are the right answer
but for one thing."""

import os
import shlex
import shutil

from scalelab import doctor

# 05.1


def typed(nnodes=len, nproc=lambda hosts, ranks: ranks,
          meet=lambda hosts, port, i: f"{hosts[0]}:{port}", backend="--rdzv-backend=c10d",
          program="torchrun", rest="--rdzv-id=job", of=lambda i: "",
          job=lambda job: job):  # fmt: skip
    """Launch lines: right ones, but for one thing. meet: None where no endpoint is named."""

    def lines(hosts, ranks_per_node, port, script):
        found = {}
        for i in range(len(hosts)):
            place = meet(hosts, port, i)
            words = [program, f"--nnodes={nnodes(hosts)}", backend, rest, of(i)]
            words += [f"--rdzv-endpoint={place}"] * (place is not None)
            if nproc:
                words.append(f"--nproc-per-node={nproc(hosts, ranks_per_node)}")
            found[i] = " ".join(w for w in [*words, job(script)] if w)
        return found

    return lines


def by_number(number=lambda i: i, address="--master-addr={host} --master-port={port}"):
    """Lines that number the nodes themselves."""

    def lines(hosts, ranks_per_node, port, script):
        where = address.format(host=hosts[0], port=port)
        return {
            i: f"torchrun --nnodes={len(hosts)} --nproc-per-node={ranks_per_node} "
               f"--node-rank={number(i)} {where} {script}" for i in range(len(hosts))
        }  # fmt: skip

    return lines


def learnt_by_heart(hosts, ranks_per_node, port, script):
    line = "torchrun --nnodes=3 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=node0:29400"
    return dict.fromkeys(range(3), f"{line} {script}")


def a_list(hosts, ranks_per_node, port, script):
    return list(typed()(hosts, ranks_per_node, port, script).values())


def by_name(hosts, ranks_per_node, port, script):
    return dict(zip(hosts, a_list(hosts, ranks_per_node, port, script)))


def only_the_first(hosts, ranks_per_node, port, script):
    return {0: typed()(hosts, ranks_per_node, port, script)[0]}


def options_last(hosts, ranks_per_node, port, script):
    line = f"--rdzv-endpoint={hosts[0]}:{port} --nproc-per-node={ranks_per_node}"
    return {i: f"torchrun --nnodes={len(hosts)} {script} {line}" for i in range(len(hosts))}


def ends_its_line(hosts, ranks_per_node, port, script):
    right = typed()(hosts, ranks_per_node, port, script)
    return {i: line.replace(" --rdzv-backend", " \\\n --rdzv-backend") for i, line in right.items()}


# 05.2


def look_names(cluster):
    """(kind, host) of the first fault that is seen, as a person at the hosts would find it."""
    for node in cluster.nodes:
        for other in cluster.nodes:
            found = node.sh(f"getent ahostsv4 {other.name}").stdout.split()
            if found[:1] != [other.addr]:
                return "names", node
        if "GLOO_SOCKET_IFNAME" in node.env:
            return "nic", node
    first, second = cluster.nodes
    if first.sh(f"ping -c 1 -W 1 -M do -s 8972 {second.name}").returncode:
        return "mtu", None
    return None, None


def put_names_right(node):
    names = {n.name: n.addr for n in node.cluster.nodes}
    old = node.sh("cat /etc/hosts").stdout.splitlines()
    kept = [line for line in old if not set(line.split()[1:]) & set(names)]
    node.set_hosts("\n".join(kept + [f"{addr} {name}" for name, addr in names.items()]) + "\n")


def mend_names(names=put_names_right, nic=lambda node: node.env.pop("GLOO_SOCKET_IFNAME"),
               mtu=lambda cluster: cluster.set_link(mtu=1500), first=None,
               says=lambda blamed: blamed):  # fmt: skip
    """Mends everything rightly, but for one thing. first: what is done before anything else."""

    def mend(cluster):
        if first:
            first(cluster)
        blamed = []
        while True:
            kind, node = look_names(cluster)
            name = node.name if node else kind and "network"
            if kind is None or name in blamed:
                break
            blamed.append(name)
            if kind == "names":
                names(node)
            elif kind == "nic":
                nic(node)
            else:
                mtu(cluster)
        return says("all" if len(blamed) > 1 else blamed[0] if blamed else None)

    return mend


def whole_hosts_file(node):
    lines = ["127.0.0.1 localhost", *(f"{n.addr} {n.name}" for n in node.cluster.nodes)]
    node.set_hosts("\n".join(lines) + "\n")


def own_name_is_loopback(node):
    put_names_right(node)
    text = node.sh("cat /etc/hosts").stdout
    node.set_hosts(text.replace(f"{node.addr} {node.name}", f"127.0.0.1 {node.name}"))


def appended(node):
    text = node.sh("cat /etc/hosts").stdout
    more = "".join(f"{n.addr} {n.name}\n" for n in node.cluster.nodes)
    node.set_hosts(text + more)


def always_node1(cluster):
    node = cluster.node(1)
    put_names_right(node)
    node.env.pop("GLOO_SOCKET_IFNAME", None)
    if look_names(cluster)[0] == "mtu":
        cluster.set_link(mtu=1500)
        return "network"
    return "node1"


def blames_node1(cluster):
    mend_names()(cluster)
    return "node1"


def loopback_everywhere(cluster):
    for node in cluster.nodes:
        node.env["GLOO_SOCKET_IFNAME"] = "lo"


def drops_a_host(cluster):
    kind, node = look_names(cluster)
    if node:
        node.kill()
        return node.name
    if kind:
        cluster.set_link(mtu=1500)
        return "network"
    return None


def forgets_a_host(cluster):
    kind, node = look_names(cluster)
    if node:
        cluster.nodes.remove(node)
        return node.name
    return mend_names()(cluster)


def only_looks(cluster):
    kind, node = look_names(cluster)
    return node.name if node else "network" if kind else None


def with_a_mistake(cluster):
    return cluster.nodes[2].name


# 05.3


def opened(peers=lambda peers: peers, ports=None, head=lambda head: head, first=True, keep=True,
           rendezvous=True, data=True, **other):  # fmt: skip
    """Rules: the right ones but for one thing. ports: (low, high, port) to the range opened."""

    def opening(rules, is_head, others, port, low, high):
        span = ports(low, high, port) if ports else f"{low}-{high}"
        wanted = [span] * data + [str(port)] * (rendezvous and head(is_head))
        new = [
            {"action": "accept", "proto": "tcp", "ports": p, "peer": peer, **other}
            for peer in peers(others) for p in wanted
        ]  # fmt: skip
        old = rules if keep else []
        return new + old if first else old + new

    return opening


def as_they_were(rules, head, peers, port, low, high):
    return rules


def no_firewall(rules, head, peers, port, low, high):
    return [{"action": "accept"}]


def only_on_the_head(rules, head, peers, port, low, high):
    return opened()(rules, head, peers, port, low, high) if head else rules


def own_address(rules, head, peers, port, low, high):
    mine = ({"10.77.0.1", "10.77.0.2", "10.77.0.3"} - set(peers)).pop()
    if len(peers) == 1:
        mine = ({"10.77.0.1", "10.77.0.2"} - set(peers)).pop()
    return opened(peers=lambda peers: [mine])(rules, head, peers, port, low, high)


def a_dict(rules, head, peers, port, low, high):
    return {"ports": f"{low}-{high}", "peers": peers}


def port_as_a_word(rules, head, peers, port, low, high):
    return [{"action": "allow", "proto": "tcp", "ports": f"{low}-{high}"}, *rules]


# 05.4


def look_files(cluster, folder):
    """(path, host) of the first directory that a host has wrongly."""
    for path in (folder / "datasets" / "books", folder / "checkpoints"):
        stat = os.stat(path)
        for node in cluster.nodes:
            same = node.sh(f"stat -c %d:%i {path}").stdout.strip() == f"{stat.st_dev}:{stat.st_ino}"
            if not same or node.sh(f"test -w {path}").returncode:
                return path, node
    return None, None


def share_again(path, node, folder):
    rescued = folder / "rescued"
    if path.name == "checkpoints":
        rescued.mkdir()
        node.sh(f"cp -p {path}/* {rescued}")
    node.set_dir(str(path), "shared")
    if rescued.exists():
        for file in rescued.iterdir():
            shutil.copy2(file, path)
        shutil.rmtree(rescued)


def mend_files(share=share_again, first=None, says=lambda node: node and node.name):
    """Mends everything rightly, but for one thing."""

    def mend(cluster, folder):
        if first:
            first(cluster, folder)
        path, node = look_files(cluster, folder)
        if node:
            share(path, node, folder)
        return says(node)

    return mend


def share_all(cluster, folder):
    for node in cluster.nodes:
        for path in (folder / "datasets" / "books", *folder.iterdir()):
            if path.is_dir():
                node.set_dir(str(path), "shared")


def share_reference(cluster, folder):
    for node in cluster.nodes:
        node.set_dir(str(folder / "reference"), "shared")


def without_copying(path, node, folder):
    node.set_dir(str(path), "shared")


def only_what_raises(cluster, folder):
    """Sees what raises an error, and not the quiet ones."""
    for name in ("datasets/books", "checkpoints"):
        path = folder / name
        for node in cluster.nodes:
            if node.sh(f"ls {path} && test -w {path}").returncode:
                node.set_dir(str(path), "shared")
                return node.name
    return None


def counts_files(cluster, folder):
    """Compares how many files there are, and not in what order."""
    path, node = look_files(cluster, folder)
    if node and path.name == "books":
        counts = {n.name: n.sh(f"ls {path} | wc -l").stdout.strip() for n in cluster.nodes}
        if len(set(counts.values())) == 1:
            return None
    if node:
        share_again(path, node, folder)
    return node and node.name


def data_only(path, node, folder):
    if path.name == "books":
        share_again(path, node, folder)


def read_only_both(path, node, folder):
    """So that both hosts have the same."""
    share_again(path, node, folder)
    if path.name == "checkpoints":
        node.set_dir(str(path), "readonly")


def copies_the_data(path, node, folder):
    """Every host its own copy, in place of one directory for all."""
    if path.name != "books":
        return share_again(path, node, folder)
    copy = folder / "copy"
    shutil.copytree(path, copy)
    node.set_dir(str(path), "private")
    node.sh(f"rm -f {path}/*; cp {copy}/* {path}")
    shutil.rmtree(copy)


def starts_again(cluster, folder):
    """An empty directory for everybody."""
    path, node = look_files(cluster, folder)
    if node:
        node.set_dir(str(path), "shared")
        if path.name == "checkpoints":
            for file in path.iterdir():
                file.unlink()
    return node and node.name


# 05.5


def checked(free=lambda row: 1024 * int(row[3]), enough=lambda free, needed: free >= needed,
            unknown=None, quote=shlex.quote, bad=doctor.fail, fix="remove what is old",
            command="df -Pk {}", name="local disk", good=True):  # fmt: skip
    """A check: the right one but for one thing. unknown: what is said where df fails."""

    def make_check(folder, needed):
        @doctor.check(name, each=True)
        def local_disk(host, seen):
            done = host.sh(command.format(quote(folder)))
            if done.returncode:
                if not unknown:
                    raise doctor.NotChecked(done.stderr.strip())
                yield unknown(host)
                return
            found = free(done.stdout.splitlines()[-1].split())
            if not enough(found, needed):
                yield bad(host, f"{found} bytes free", fix)
            elif good:
                yield doctor.ok(host, f"{found} bytes free")

        return local_disk

    return make_check


def error_not_looked_at(folder, needed):
    @doctor.check("local disk", each=True)
    def local_disk(host, seen):
        done = host.sh(f"df -Pk {shlex.quote(folder)}")
        free = int(done.stdout.splitlines()[-1].split()[3]) * 1024
        yield doctor.ok(host, "enough") if free >= needed else doctor.fail(host, "full", "clean")

    return local_disk


def any_error_is_good(folder, needed):
    @doctor.check("local disk", each=True)
    def local_disk(host, seen):
        try:
            done = host.sh(f"df -Pk {shlex.quote(folder)}")
            free = int(done.stdout.splitlines()[-1].split()[3]) * 1024
        except Exception:
            free = needed
        yield doctor.ok(host, "enough") if free >= needed else doctor.fail(host, "full", "clean")

    return local_disk


def any_error_is_bad(folder, needed):
    @doctor.check("local disk", each=True)
    def local_disk(host, seen):
        try:
            done = host.sh(f"df -Pk {shlex.quote(folder)}")
            free = int(done.stdout.splitlines()[-1].split()[3]) * 1024
        except Exception:
            free = 0
        yield doctor.ok(host, "enough") if free >= needed else doctor.fail(host, "full", "clean")

    return local_disk


def all_in_one(folder, needed):
    @doctor.check("local disk")
    def local_disk(seen):
        for host in seen.hosts:
            yield from checked()(folder, needed)(host, seen)

    return local_disk


def here_and_not_there(folder, needed):
    @doctor.check("local disk", each=True)
    def local_disk(host, seen):
        free = shutil.disk_usage(folder).free
        yield doctor.ok(host, "enough") if free >= needed else doctor.fail(host, "full", "clean")

    return local_disk


def returns_one(folder, needed):
    @doctor.check("local disk", each=True)
    def local_disk(host, seen):
        return doctor.ok(host, "enough")

    return local_disk


def not_declared(folder, needed):
    def local_disk(host, seen):
        yield doctor.ok(host, "enough")

    return local_disk


def of_nobody(folder, needed):
    @doctor.check("local disk", each=True)
    def local_disk(host, seen):
        for finding in checked()(folder, needed)(host, seen):
            finding.where = None
            yield finding

    return local_disk


WRONG = {
    "05.1": [
        ("learnt by heart", learnt_by_heart, r"gpu-b.*lines for \[0, 1, 2\]"),
        ("a list", a_list, r"return a dict of one line a node"),
        ("by name", by_name, r"the nodes are 0 to 2"),
        ("only the first node's", only_the_first, r"each needs one"),
        ("nnodes counts ranks", typed(nnodes=lambda hosts: 2 * len(hosts)), r"counts ranks"),
        ("nproc counts all ranks", typed(nproc=lambda hosts, ranks: len(hosts) * ranks),
         r"starts 18 ranks: it is the number on each node"),
        ("no nproc", typed(nproc=None), r"--nproc-per-node=2 is missing"),
        ("localhost", typed(meet=lambda hosts, port, i: f"localhost:{port}"),
         r"itself on every machine"),
        ("its own name on each", typed(meet=lambda hosts, port, i: f"{hosts[i]}:{port}"),
         r"do not meet in one place"),
        ("no port", typed(meet=lambda hosts, port, i: hosts[0]), r"has no port"),
        ("the usual port", typed(meet=lambda hosts, port, i: f"{hosts[0]}:29400"),
         r"port 29400, and the port that is free"),
        ("a port a node", typed(meet=lambda hosts, port, i: f"{hosts[0]}:{port + i}"),
         r"node 1: port 29401"),
        ("address with c10d", typed(meet=lambda *_: None, rest="--master-addr=node0"),
         r"not read with --rdzv-backend=c10d"),
        ("no endpoint", typed(meet=lambda *_: None), r"no --rdzv-endpoint"),
        ("no backend", typed(backend=""), r"without --rdzv-backend=c10d"),
        ("an id a node", typed(of=lambda i: f"--rdzv-id=job{i}"), r"different --rdzv-id"),
        ("all are node 0", by_number(lambda i: 0), r"every node says that it is node 0"),
        ("counted from 1", by_number(lambda i: i + 1), r"counts from 0"),
        ("no address", by_number(address=""), r"itself on every machine"),
        ("standalone", typed(rest="--standalone"), r"--standalone means this node alone"),
        ("python", typed(program="python"), r"no torchrun tells its rank"),
        ("mpirun", typed(program="mpirun"), r"does not start torchrun"),
        ("options behind the script", options_last, r"stands behind the script"),
        ("no arguments", typed(job=lambda job: job.split()[0]), r"the job is 'pretrain"),
        ("a misspelt option", typed(rest="--rdzv-idd=job"), r"torchrun refuses this line"),
        ("a URL", typed(meet=lambda hosts, port, i: f"tcp://{hosts[0]}:{port}"), r"is a URL"),
        ("two lines", ends_its_line, r"more than one line"),
    ],
    "05.2": [
        ("only looks", only_looks, r"not mended"),
        ("no names", mend_names(names=lambda node: None), r"still (leads|does not know)"),
        ("no interface", mend_names(nic=lambda node: None), r"IFNAME=(lo|enp5s0) "),
        ("no MTU", mend_names(mtu=lambda cluster: None), r"200 KB .* do not arrive"),
        ("always small packets", mend_names(first=lambda cluster: cluster.set_link(mtu=1500)),
         r"nothing is wrong: node0's MTU is 1500 now"),
        ("smaller than it need be", mend_names(mtu=lambda cluster: cluster.set_link(mtu=1000)),
         r"as large as it can be"),
        ("the whole hosts file", mend_names(names=whole_hosts_file), r"storage.* is lost"),
        ("own name to loopback", mend_names(names=own_name_is_loopback), r"leads to 127\.0\.0\.1"),
        ("appended", mend_names(names=appended), r"both lines are in /etc/hosts"),
        ("all variables", mend_names(nic=lambda node: node.env.clear()), r"TEAM_CACHE is lost"),
        ("lo everywhere", loopback_everywhere,
         r"fine, and is not any more.*IFNAME=lo "),
        ("always node1", always_node1, r"you return 'node1' where it is None"),
        ("blames node1", blames_node1, r"you return 'node1'"),
        ("says nothing", mend_names(says=lambda blamed: None), r"you return None"),
        ("switches it off", drops_a_host, r"a host is gone"),
        ("leaves it out", forgets_a_host, r"a host is gone"),
        ("a mistake in it", with_a_mistake, r"IndexError.*in with_a_mistake"),
    ],
    "05.3": [
        ("as they were", as_they_were, r"the rules are as they were"),
        ("only the rendezvous port", opened(data=False), r"rendezvous port alone is not enough"),
        ("not the rendezvous port", opened(rendezvous=False), r"the rendezvous is on this host"),
        ("high ports to everybody", opened(peers=lambda p: [None], ports=lambda *_: "1024-65535"),
         r"no host of this job.*for everybody"),
        ("high ports to the peers", opened(ports=lambda *_: "1024-65535"), r"not more"),
        ("to everybody", opened(peers=lambda p: [None]), r"a rule without peer is for everybody"),
        ("to the network", opened(peers=lambda p: ["10.77.0.0/24"]), r"a whole network"),
        ("no firewall", no_firewall, r"a rule without peer is for everybody"),
        ("outwards", opened(direction="out"), r"direction out"),
        ("udp", opened(proto="udp"), r"the rule is for udp"),
        ("any protocol", opened(proto="any"), r"any is let in as well"),
        ("behind the drop", opened(first=False), r"the first that matches wins"),
        ("locked out", opened(keep=False), r"locked yourself out"),
        ("only on the head", only_on_the_head, r"the rules are as they were"),
        ("rendezvous port everywhere", opened(head=lambda head: True), r"needs no opening"),
        ("one peer of two", opened(peers=lambda p: p[:1]), r"some of the peers"),
        ("its own address", own_address, r"not this host"),
        ("the usual range", opened(ports=lambda *_: "32768-60999"), r"it needs 50000 to 50199"),
        ("a range too short", opened(ports=lambda low, high, _: f"{low}-{low + 99}"),
         r"ports that the kernel chooses, all of"),
        ("a dict", a_dict, r"return a list of rules"),
        ("another language", port_as_a_word, r"refuses these rules.*'allow'"),
    ],
    "05.4": [
        ("only looks", mend_files(share=lambda *_: None), r"not mended"),
        ("all shared", mend_files(first=share_all), r"scratch is another directory"),
        ("reference writable", mend_files(first=share_reference), r"meant to be read-only"),
        ("checkpoint left behind", mend_files(share=without_copying),
         r"begin again 20 steps earlier"),
        ("only what raises", only_what_raises, r"sees 5 of|another order|its own disk"),
        ("order not compared", counts_files, r"in another order"),
        ("data only", mend_files(share=data_only), r"checkpoint"),
        ("read-only", mend_files(share=read_only_both), r"Read-only file system"),
        ("copies", mend_files(share=copies_the_data), r"in another order|two directories"),
        ("checkpoints emptied", starts_again, r"does not see"),
        ("says nothing", mend_files(says=lambda node: None), r"you return None"),
        ("says the path", mend_files(says=lambda node: node and "checkpoints"),
         r"you return 'checkpoints'"),
    ],
    "05.5": [
        ("error not looked at", error_not_looked_at, r"ends with an error.*Look at returncode"),
        ("an error is good", any_error_is_good, r"no-such-folder.*counted as good"),
        ("unknown is good", checked(unknown=lambda host: doctor.ok(host, "no such folder")),
         r"counted as good"),
        ("unknown is bad", checked(unknown=lambda host: doctor.fail(host, "no folder", "make it")),
         r"blamed for what nobody knows"),
        ("an error is bad", any_error_is_bad, r"blamed for what nobody knows"),
        ("all in one function", all_in_one, r"each=True"),
        ("KiB for bytes", checked(free=lambda row: int(row[3])), r"counts in KiB"),
        ("thousands", checked(free=lambda row: 1000 * int(row[3])), r"fail where it is pass"),
        ("column Used", checked(free=lambda row: 1024 * int(row[2])), r"where it is"),
        ("total", checked(free=lambda row: 1024 * int(row[1])), r"Is it the column Available"),
        ("total less used", checked(free=lambda row: 1024 * (int(row[1]) - int(row[2]))),
         r"Is it the column Available"),
        ("enough is not enough", checked(enough=lambda free, needed: free > needed),
         r"Exactly as much as is needed is enough"),
        ("upside down", checked(enough=lambda free, needed: free < needed), r"upside down"),
        ("a blank in the name", checked(quote=str), r"though its df answers.*shlex.quote"),
        ("a warning", checked(bad=doctor.warn), r"so it is a fail"),
        ("no fix", checked(fix=""), r"no fix"),
        ("silent where it is well", checked(good=False), r"nothing is said of it"),
        ("human readable", checked(command="df -h {}"), r"no other form of it"),
        ("this machine's disk", here_and_not_there, r"looks at this machine"),
        ("returns it", returns_one, r"yields its findings"),
        ("not declared", not_declared, r"plain function"),
        ("of nobody", of_nobody, r"nothing is said of it"),
        ("a name that is taken", checked(name="shared directory"), r"give yours another"),
    ],
}  # fmt: skip
