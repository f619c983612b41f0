#!/usr/bin/env bash
# systemd as the first process of a machine of its own.
#   boot_systemd.sh ROOT SOURCE PYTHON SITE_PACKAGES    under unshare: new mount, PID, network, IPC,
#                                                       UTS and cgroup namespaces
# Its root is a new tmpfs in which all that is ours is read-only: systemd empties directories and
# writes settings, and reaches nothing where that could hurt.  The first step that fails ends it all.
set -euo pipefail
root=$1 source=$2 python=$3 packages=$4
[ $$ = 1 ]
[ "$(findmnt --noheadings --output PROPAGATION --mountpoint / | tail -n 1)" = private ]

mount -t tmpfs -o mode=0755 baton-root "$root"
cd "$root"
venv=opt/baton
site=$venv/lib/$(basename "$(dirname "$packages")")/site-packages
mkdir -p usr dev proc sys tmp run var/log old opt/{python,source} $venv/bin "$site" \
    etc/{baton,credstore} etc/systemd/system/service.d
chmod 1777 tmp
for link in bin sbin lib lib64; do ln -s usr/$link $link; done
mount --bind -o ro /usr usr
mount --bind -o ro "$python" opt/python
mount --bind -o ro "$source" opt/source
mount --bind -o ro "$packages" "$site"
ln -s /opt/python/bin/python3 $venv/bin/python
printf 'home = /opt/python/bin\n' > $venv/pyvenv.cfg
cp -L /etc/{passwd,group,nsswitch.conf,hosts,ld.so.conf} etc
printf '/opt/python/lib\n' >> etc/ld.so.conf
for unit in sysinit basic multi-user network-online shutdown; do
    printf '[Unit]\nDefaultDependencies=no\n' > etc/systemd/system/$unit.target
done
printf '[Service]\nStandardOutput=append:/var/log/%%n\nStandardError=inherit\n' \
    > etc/systemd/system/service.d/log.conf

mount -t tmpfs -o mode=0755 baton-dev dev
mkdir dev/{shm,pts}
for node in null zero full random urandom tty; do
    touch dev/$node
    mount --bind /dev/$node dev/$node
done
mount -t devpts -o ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s null dev/console
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount --bind -o ro proc/sys proc/sys

pivot_root . old
umount -l /old
rmdir /old
mount --make-rshared / # credentials are mounted by a child and must be seen by the services
ldconfig
ip link set lo up
exec env -i PATH=/usr/sbin:/usr/bin container=baton SYSTEMD_UNIT_PATH=/etc/systemd/system \
    /lib/systemd/systemd --system --unit=basic.target --show-status=no
